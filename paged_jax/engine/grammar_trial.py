"""What `grammar.try_grammar` runs in a process of its own: compiles a grammar and says nothing.

It ends by a signal where the grammar needs more than `STACK_BYTES` of stack.
"""

import json
import sys
import threading

STACK_BYTES = 2**21
"""A quarter of what threads of a server usually have."""


def main() -> None:
    """Reads {"path": sys.path of the parent, "grammar": ...} from stdin."""
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]
    from llguidance import LLMatcher, LLTokenizer

    def compile() -> None:
        matcher = LLMatcher(LLTokenizer("byte"), asked["grammar"], log_level=0)
        matcher.compute_bitmask()

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=compile)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
