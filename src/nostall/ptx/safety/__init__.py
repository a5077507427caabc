"""Translation validator for PTX: prove that a re-ordered text computes what the original does.

The package has its own reader and its own rules.  It imports nothing of ``nostall.ptx.text``,
``nostall.ptx.program`` and ``nostall.ptx.schedule``, so that one error cannot be in both the moves
and their proof.
"""
