"""What a cell of the table can say, and its columns."""

WORKS, PARTLY, REFUSED, WRONG, CRASH = "works", "partly", "refused", "wrong", "crash"
NOT_THERE = "not there"  # transformers cannot do it in BF16 either
COLUMNS = (
    "convert", "FP8Config", "quantize, load", "save, load", "transformers' load",
    "experts_implementation",
)  # fmt: skip
