"""Programs that use nmkernels. The benchmarks and tests import the model and the text of ``train_gpt``."""
