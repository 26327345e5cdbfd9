"""The table reads the same every time, and says of each figure what it is."""

import nmkernels as nm
from nmkernels.audit.report import Advice, Audit, LayerAudit
from nmkernels.audit.rules import Piece

WANTED = """\
                                       predicted
layer              shape     of dense  inference   step  more  why
h.*.up ×2          (64,32)     33.3 %      2.00x  1.60x     a  2:4
h.*.down ×2        (32,64)     33.3 %      1.00x  1.00x     b  left dense
lm_head            (100,64)    33.3 %      1.00x  1.00x        output head
all linear layers                          1.20x  1.14x
67 % of the dense time is in layers that stay dense, so the total speed-up cannot exceed 1.5x.
Range for the slowest and fastest sparse GEMMs below: inference 1.10x to 1.30x, step 1.10x to 1.20x.
50 % of the recipe's steps are sparse; its whole run is 1.07x.
A note.
what to change to gain more
  a  do this; step: h.*.up to (64,64) 1.60x to 2.50x
  b  do that"""


def made():
    fprop, rest = Piece("fprop", 1.0, 0.5, "sparse"), Piece("wgrad", 3.0, 2.0, "dense")
    same = (Piece("fprop", 1.0, 1.0, "dense"), Piece("wgrad", 3.0, 3.0, "dense"))
    up = LayerAudit("h.*.up", ("h.0.up", "h.1.up"), "Linear", (64, 32), "float32", "2:4", True, "2:4", 8, 2, (fprop,), (fprop, rest))
    down = LayerAudit("h.*.down", ("h.0.down", "h.1.down"), "Linear", (32, 64), "float32", "", False, "left dense", 8, 2, same[:1], same)
    head = LayerAudit("lm_head", ("lm_head",), "Linear", (100, 64), "float32", "", False, "output head", 8, 2, same[:1], same)
    up = LayerAudit(**{**vars(up), "advice": (Advice("do this", "step", 2.5, "to (64,64)"),)})
    down = LayerAudit(**{**vars(down), "advice": (Advice("do that"),)})
    return Audit((up, down, head), "H200 SXM", "x", 8, 1, 0.5, (1.1, 1.3), (1.1, 1.2), notes=("A note.",))


def test_every_line_of_a_table():
    assert str(made()) == WANTED


def test_measured_columns_appear_where_something_was_measured():
    one = made().layers[0]
    measured = LayerAudit(**{**vars(one), "measured_inference": one.inference, "measured_step": one.step, "note": "measured on 4 tokens"})
    head, line = str(Audit((measured,), "here", "x", 8)).splitlines()[1:3]
    assert head.split() == ["layer", "shape", "of", "dense", "inference", "step", "inference", "step", "more", "why"]
    assert line.count("1.60x") == 2 and line.count("2.00x") == 2
    assert "2:4; measured on 4 tokens" in line and "measured" in str(Audit((measured,), "here", "x", 8)).splitlines()[0]


def test_the_words_of_a_prediction():
    text = str(nm.audit({"fc": (4096, 4096)}, 8192, device="H200", dtype="bfloat16"))
    assert "Predicted by a roofline, not measured: H200 SXM" in text and "A step of sste:2:4: 8192 tokens;" in text
    passes = str(nm.audit({"fc": (4096, 4096)}, 512, "srste:1:8", device="A100", dtype="bfloat16", accumulate=4))
    assert "512 tokens, 4 passes per optimizer step" in passes and "400 W" in passes
