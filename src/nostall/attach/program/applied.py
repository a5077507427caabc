"""The half of ``nostall apply --bundle`` inside the user's program."""

from __future__ import annotations

import sys
from multiprocessing import parent_process

from nostall.attach.program.changes import Change, OptimizerFlag
from nostall.attach.program.changing.captured import CapturedOptimizer
from nostall.attach.program.changing.loader import KIND as LOADER
from nostall.attach.program.changing.losses import CompiledLoss
from nostall.attach.program.changing.settings import ExpandableSegments
from nostall.attach.program.kernels import NativeKernels
from nostall.attach.program.machine import driver_version, rank, transformers_version
from nostall.attach.program.roots import other_program
from nostall.attach.program.session import Session
from nostall.attach.program.shadow import CLASSES


class Applied(Session):
    """Makes the changes of a bundle once all optimisers have stepped; measures nothing.

    Steps that are found otherwise than those of the bundle, such as the calls of an evaluation
    before a training, are no steps.
    """

    is_done = False
    other_step = ""
    """What a step was that the bundle was not measured on."""

    def _border(self) -> None:
        if self.borders.found != self.settings.get("step_is", ""):
            self.other_step = self.borders.found or "a step of the optimisers"
            return
        if self.borders.changes != self._closing_changes:
            self._closing_changes = self.borders.changes
            return
        self.steps, self._ended, self.is_done = 1, True, True
        self.segments.remove()
        self.kernels.remove()
        self._install_switches()
        self.attention.remove()
        identity = self.settings.get("identity")
        if identity is not None and (reason := other_program(identity, self.roots)):
            self._give_up(reason)
            return
        at_start = [c for c in self.settings["changes"] if c["kind"] == LOADER]
        self._make({"changes": [c for c in self.settings["changes"] if c not in at_start]})
        for name, reason in [(n, self._missing(c)) for n, c in self.changes.items()]:
            if reason:
                del self.changes[name]
                print(f"nostall: not applied: {name}: {reason}; run `nostall optimize` again",
                      file=sys.stderr)  # fmt: skip
        changes = [c for c in self.settings["changes"] if c["name"] in self.changes] + at_start
        names = list(self.changes)
        self._apply(names)
        self._release()
        if changes and rank()[0] == 0:
            shown = [
                f"{c['name']} (changes numbers)" if c["result_class"] == CLASSES[3] else c["name"]
                for c in changes
            ]
            print(f"nostall: applied {', '.join(shown)}", file=sys.stderr)

    def _missing(self, change: Change) -> str:
        """Why a change would change nothing here; empty if it would."""
        reason = change.missing()
        others = (
            OptimizerFlag | CapturedOptimizer | NativeKernels | CompiledLoss | ExpandableSegments
        )
        needs_calls = not isinstance(change, others)
        if reason and not self.switches and needs_calls:
            return self.switch_obstacle or reason
        return reason

    def _give_up(self, reason: str) -> None:
        self._ended = True
        self._take_back()
        more = "; its loaders have workers" if LOADER in self.settings else ""
        print(f"nostall: the bundle is not applied: {reason}{more}", file=sys.stderr)

    def at_exit(self) -> None:
        """Say that nothing was changed, in the program itself, not in its workers or torchrun."""
        is_launcher = "torch.distributed.run" in sys.modules
        is_other = is_launcher or parent_process() is not None
        if not self.is_done and "torch" in sys.modules and not is_other:
            reason = "no step has ended"
            if self.other_step:
                wanted = self.settings.get("step_is") or "steps of the optimisers"
                reason = f"a step is {self.other_step}, and it was measured on {wanted}"
            print(f"nostall: the bundle is not applied: {reason}", file=sys.stderr)

    def refusal(self) -> str:
        """Why the bundle does not fit PyTorch or the driver; empty if it does."""
        machine = self.settings["machine"]
        found = {"torch": sys.modules["torch"].__version__, "driver": machine["driver"]}
        if machine["driver"] is not None:
            found["driver"] = driver_version()
        if machine.get("transformers") is not None:
            found["transformers"] = str(transformers_version())
        for part, here in found.items():
            if here != machine[part]:
                return (
                    f"{self.settings['bundle']} was measured with {part} {machine[part]}, and here "
                    f"it is {here}; run `nostall optimize` here"
                )
        return ""
