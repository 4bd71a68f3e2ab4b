"""The process that renders chat templates: `python -P -m memopt.runtime.text.template_worker`.

A JSON object a line comes in ({"template", "variables"}), one goes out ({"text"} or {"error"}). The operating system
bounds it: memory by an address-space limit, each rendering's time by an alarm that ends the process, even amid one
string operation. It ends when its input does, so it never outlives the process that asked.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

from jinja2 import TemplateError

from memopt.runtime.text.template_environment import compile_template, render
from memopt.runtime.text.template_limits import TemplateLimits


def answer(request: dict[str, Any], max_characters: int) -> dict[str, str]:
    """The text that `request` asks for, or why there is none."""
    try:
        text = render(compile_template(request["template"]), request["variables"], max_characters)
        text.encode("utf-8")
    except TemplateError as problem:
        return {"error": str(problem) or type(problem).__name__}
    except MemoryError:
        return {"error": "the template took too much memory"}
    except RecursionError:
        return {"error": "the template calls itself without end, or is nested too deeply"}
    except Exception as problem:  # noqa: BLE001 - a template's expressions raise anything, and it compiles to Python
        return {"error": f"{type(problem).__name__}: {problem}"}
    return {"text": text}


def serve(limits: TemplateLimits) -> None:
    """Answer standard input's lines on standard output until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    # Ctrl-C is for the process that asked; it closes our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, limits.seconds)
        reply = json.dumps(answer(json.loads(line), limits.max_characters))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(TemplateLimits(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
