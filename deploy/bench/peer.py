"""How peers answer `build/bench`: one JSON object per line on stdin, each answered by one on stdout."""

import json
import sys


def serve(new, engine):
    """Makes a peer of the first request, new(request), and answers it by {"engine": engine}; answers every other by the
    peer's measure(request). What a library prints goes to stderr."""
    answers, peer = sys.stdout, None
    sys.stdout = sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        if peer is None:
            peer, answer = new(request), {"engine": engine}
        else:
            answer = peer.measure(request)
        print(json.dumps(answer), file=answers, flush=True)
