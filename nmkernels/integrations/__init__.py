"""Other libraries' ways in; each file is imported by who uses that library, never by nmkernels itself."""
