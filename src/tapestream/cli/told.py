"""Messages of the Python interface as the command tells them: with options in the place of arguments and names."""

import re

_WHERE = r"this schedule reaches (.+?) \(\d+ bytes\) in {}, (.+?) \(\d+ bytes\) are allowed; .*?the smaller budget"
_WHO = r"Program|measure_machine|verify|stream|load|save|Batches|ImageBatches|GPTConfig|ResNetConfig|DRANetConfig"
_NAMES = r"home|device|planner|update|budget|folder|where"
_WORDS = (
    (_WHERE.format("DEVICE"), r"the plan takes \1 of the device, and \2 are allowed (--budget)"),
    (_WHERE.format("HOST"), r"the plan takes \1 of RAM, and \2 are allowed (--host-budget)"),
    (_WHERE.format("DISK"), r"the plan takes \1 of the disk, and \2 are free"),
    (rf"^(?:{_WHO})(?:\(\))?: ", ""),
    (r": for a linear head and F\.cross_entropy, stream\(.*?\) never makes all logits", ""),
    (r"(is some block not deterministic\?) stream\(\.\.\., verify=True\) finds it", r"\1"),
    (r", or say how many await their backward at once: Budget\(\.\.\., calls=\)", ""),
    (r", or plan it as it is, in Python: tapestream\.plan\(model, batch\)", ""),
    (r": use tapestream\.plan\(model, batch\) in Python", ", as `tapestream verify` does"),
    (r"; name the layer that makes the logits with head='name\.of\.module', or pass loss_chunks=None$", ""),
    (r"\bloss_chunks\b(?!=)", "--loss-chunks"),
    (r"; plan it in Python: tapestream\.plan\(model, batch\)", ", which the command cannot plan"),
    (r"\(home=, folder=\)", "(--home, --folder)"),
    (r"\bBudget\(host=\)", "--ram"),
    (r"\bBudget\(disk=\)", "--disk"),
    (r"\bblocks=\['layers'\], or list\(model\.layers\)\[:3\] for the first three", "--blocks layers"),
    (r"\bstream\(\.\.\., budget=\.\.\.\)", "--budget"),
    (r"\bthe folder given to ts\.save\(\)", "the folder given as --saves"),
    (rf"\b({_NAMES})='([^']*)'", r"--\1 \2"),
    (rf"\b({_NAMES}|blocks)=(?:\[?\.\.\.\]?)?(?![\w'\[(=])", r"--\1"),
)


def told(message: str) -> str:
    """``message`` with options in the place of arguments of Python."""
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    return message
