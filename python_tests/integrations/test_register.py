"""Registration with other libraries: by an explicit import, or after layers were swapped."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import nmkernels as nm
from nmkernels import integrations
from python_tests.house.paths import ROOT

QUANTIZER = "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known\n"
SWAP = "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(64, 64))\nhandle = nm.sparsify_(model, 'ste:2:4')\n"


def ran(code: str) -> None:
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import nmkernels.integrations.hf\n" + QUANTIZER, QUANTIZER + "import nmkernels.integrations.hf\n"])
def test_one_import_registers_with_transformers_in_either_order(first: str) -> None:
    pytest.importorskip("transformers")
    ran(f"{first}import nmkernels\nassert known['nmkernels'] is nmkernels.integrations.hf.NMQuantizer")


@pytest.mark.slow
def test_swapping_registers_with_transformers() -> None:
    pytest.importorskip("transformers")
    ran(
        f"import nmkernels as nm, sys\n{SWAP}assert 'nmkernels.integrations.hf' not in sys.modules\nimport transformers.modeling_utils\n"
        f"{QUANTIZER}assert 'nmkernels' not in known\nhandle.finish(allow_unused=True)\nnm.compress_(model)\nassert 'nmkernels' in known"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", ["import nmkernels.integrations.peft", "import nmkernels as nm, peft\n" + SWAP, "import nmkernels.integrations.hf"]
)
def test_registers_with_peft(code: str) -> None:
    pytest.importorskip("peft")
    ran(f"{code}\nfrom peft.tuners.tuners_utils import BaseTuner\nassert BaseTuner.merge_adapter._nm_wraps")


def test_an_error_is_a_warning_that_names_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrations, "ADAPTERS", {"sys": "nosuch"})
    with pytest.warns(RuntimeWarning, match="nmkernels.integrations.nosuch could not register .*ModuleNotFoundError"):
        integrations.register()


def test_adapters_are_loaded_on_first_use() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    assert nm.integrations.peft.LoraConfig is peft.LoraConfig
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        nm.integrations.nothing  # noqa: B018
