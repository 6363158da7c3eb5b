package integration_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// Whoever is outside has a role, too: a worker that scores, a trainer in Python, and one of a single
// run, who is told at once what is not his.
func TestRoles_Outside(t *testing.T) {
	t.Parallel()
	interpreter := pythonWith(t, "nats, msgpack, nkeys, PIL, numpy")
	g := servers()["nats-server"](t)
	for _, service := range []string{"intake", "sampler", "reward", "advantage"} {
		args := []string{"--health-addr", "", "--nats-url", g.url, "--nats-creds", g.file(service + ".creds"), "--nats-tls-ca", g.file("tls/ca.pem")}
		if service == "sampler" {
			args = append(args, "--model", "synthetic")
		}
		launch(t, t.TempDir(), program(t, "meander-"+service), args...)
	}
	startWorker(t, "--url", g.url, "--creds", g.file("scorer.creds"), "--tls-ca", g.file("tls/ca.pem"))
	const script = `import asyncio, os
import meander

async def main():
    limited = meander.connect(os.environ["URL"], credentials=os.environ["LIMITED"], ca=os.environ["CA"])
    every = meander.connect(os.environ["URL"], credentials=os.environ["CREDS"], ca=os.environ["CA"])
    async with limited as one, every as client:
        await one.publish("a", "a red fox", uid="p", group_size=2, reward=[{"name": "nats:colour"}])
        # With the copies in its account a trainer of one run reads as one of all does.
        for who in client, one:
            async for group in who.stream_groups("a", timeout=60):
                print(group.advantage["status"])  # complete: the worker has scored all
                break
            group = await who.group("a", "p")
            for sample in group.samples:
                await who.load(sample.trajectory)
            print(len(group.samples), "samples,", len(await meander.control.keys(who.js, "mdr-presence")), "services")
        try:
            await one.publish("b", "a red fox", uid="p", group_size=2)
        except PermissionError as e:
            print("refused:", e)

asyncio.run(main())
`
	ctx, stop := context.WithTimeout(t.Context(), 5*bustest.Patience)
	defer stop()
	cmd := exec.CommandContext(ctx, interpreter, "-c", script)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join(root, "pkg/client/python"), "URL="+g.url, "CREDS="+g.file("trainer.creds"), "LIMITED="+g.file("trainer-a.creds"), "CA="+g.file("tls/ca.pem"))
	out, err := cmd.CombinedOutput()
	if text := string(out); err != nil || strings.Count(text, "complete\n2 samples, 4 services\n") != 2 || !strings.Contains(text, "refused: ") {
		t.Errorf("%v\n%s", err, out)
	}
}
