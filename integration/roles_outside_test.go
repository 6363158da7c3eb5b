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

// Programs outside of the pipeline have roles, too: a worker that scores, a trainer in Python, and one of a single
// run, who is told at once what is not his.
func TestRoles_Outside(t *testing.T) {
	t.Parallel()
	interpreter := pythonWith(t, "nats, msgpack, blake3, nkeys, PIL, numpy")
	g := servers()["nats-server"](t)
	for _, service := range []string{"intake", "sampler", "reward", "advantage"} {
		args := []string{
			"--health-addr", "", "--nats-url", g.url, "--nats-creds", g.file(service + ".creds"),
			"--nats-tls-ca", g.file("tls/ca.pem"),
		}
		if service == "sampler" {
			args = append(args, "--model", "synthetic")
		}
		launch(t, t.TempDir(), program(t, "meander-"+service), args...)
	}
	startWorker(t, "--url", g.url, "--creds", g.file("scorer.creds"), "--tls-ca", g.file("tls/ca.pem"))
	const script = `import asyncio, os
import nats, meander
from nats.js.api import AckPolicy, ConsumerConfig

# What the library has of its own, as a viewer. Where services have consumers only what names its own is let in.
async def library():
    viewer = meander.access.options(credentials=os.environ["VIEWER"], ca=os.environ["CA"])
    nc = await nats.connect(os.environ["URL"], **viewer)
    js = nc.jetstream()
    subject = "mdr.v1.trajectory.a.*.*.*"
    ordered = await js.subscribe("mdr.v1.advantage.a.*", ordered_consumer=True)
    pulled = await js.pull_subscribe(subject, config=ConsumerConfig(ack_policy=AckPolicy.NONE))
    named = await js.subscribe(subject, config=ConsumerConfig(name="viewer-of-mine-7d1f", ack_policy=AckPolicy.NONE))
    for m in [await ordered.next_msg(10), *await pulled.fetch(1, timeout=10), await named.next_msg(10)]:
        print("library", m.subject.split(".")[2])
    watcher = await (await js.key_value("mdr-presence")).watchall()
    print("library", (await watcher.updates(timeout=10)).bucket)
    await nc.drain()

async def main():
    looks = meander.connect(os.environ["URL"], credentials=os.environ["VIEWER"], ca=os.environ["CA"])
    trains = meander.connect(os.environ["URL"], credentials=os.environ["CREDS"], ca=os.environ["CA"])
    async with looks as viewer, trains as client:
        await client.publish("a", "a red fox", uid="p", group_size=2, reward=[{"name": "nats:colour"}])
        for who in client, viewer:
            async for group in who.stream_groups("a", timeout=60):
                print(group.advantage["status"])  # complete: the worker has scored all
                break
            group = await who.group("a", "p")
            for sample in group.samples:
                await who.load(sample.trajectory)
            print(len(group.samples), "samples,", len(await meander.control.keys(who.js, "mdr-presence")), "services")
        for who in client, viewer:
            async for t in who.stream_trajectories("a"):
                print("trajectory of", t["uid"])
                break
        await library()
        try:
            await viewer.publish("b", "a red fox", uid="p", group_size=2)
        except PermissionError as e:
            print("refused:", e)

asyncio.run(main())
`
	ctx, stop := context.WithTimeout(t.Context(), 5*bustest.Patience)
	defer stop()
	cmd := exec.CommandContext(ctx, interpreter, "-c", script)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join(root, "pkg/client/python"), "URL="+g.url,
		"CREDS="+g.file("trainer.creds"), "VIEWER="+g.file("viewer.creds"),
		"CA="+g.file("tls/ca.pem"))
	out, err := cmd.CombinedOutput()
	for what, n := range map[string]int{
		"complete\n2 samples, 2 services\n": 2, "refused: ": 1, "trajectory of p\n": 2,
		"library advantage\nlibrary trajectory\nlibrary trajectory\nlibrary mdr-presence\n": 1,
	} {
		if strings.Count(string(out), what) != n {
			t.Errorf("it says %q %d times, want %d", what, strings.Count(string(out), what), n)
		}
	}
	if err != nil || t.Failed() {
		t.Errorf("%v\n%s", err, out)
	}
}
