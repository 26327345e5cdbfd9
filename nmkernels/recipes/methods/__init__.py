"""The methods that this package was made for and those that they are compared with, one file each; ``recipes`` imports every file."""
