package integration_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/micro"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// natsCLI is the nats command, of the version that make nats-test builds.
type natsCLI struct {
	t    *testing.T
	path string
	env  []string
}

func newNATSCLI(t *testing.T, url string) *natsCLI {
	t.Helper()
	path := os.Getenv("MEANDER_NATS_CLI")
	if path == "" {
		t.Skip("the nats command is not tested: make nats-test does, which builds it from its Go module")
	}
	home := t.TempDir()
	bin, err := filepath.Abs(filepath.Dir(program(t, "meander")))
	if err != nil {
		t.Fatal(err)
	}
	return &natsCLI{t, path, append(os.Environ(), "NATS_URL="+url, "HOME="+home, "XDG_CONFIG_HOME="+home,
		"PATH="+bin+":"+os.Getenv("PATH"))}
}

// run runs one command line of the nats command, and returns what it prints.
func (n *natsCLI) run(args ...string) (stdout string) {
	n.t.Helper()
	c := exec.CommandContext(limited(n.t), n.path, args...)
	var errs strings.Builder
	c.Env, c.Stderr = n.env, &errs
	out, err := c.Output()
	if err != nil {
		n.t.Fatalf("nats %q: %v\n%s%s", args, err, out, &errs)
	}
	return string(out)
}

// What deploy/guide/nats.md says of the nats command.
func TestNATS_CLI(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	url := serve(t, dir).URL
	cli := newNATSCLI(t, url)
	t.Run("publishes JSON", func(t *testing.T) {
		cli := &natsCLI{t, cli.path, cli.env}
		bustest.Until(t, "an intake", func() error {
			var receipt schemas.Receipt
			dry := cli.run("req", "--raw", "mdr.v1.dry.demo", `{"prompt": "a red sign"}`)
			switch err := schemas.Decode([]byte(dry), &receipt); {
			case err != nil: // none answers yet
				return err
			case !json.Valid([]byte(dry)) || !receipt.Accepted && receipt.Waiting == "" || receipt.Accepted &&
				receipt.Samples != 8:
				t.Errorf("asked dry: %s", dry)
			case receipt.Waiting != "":
				return errors.New(receipt.Waiting)
			}
			return nil
		})
		cli.run("pub", "mdr.v1.prompt.demo", `{"prompt": "a red sign", "group_size": 4}`)
		for range 2 { // one of the two is stored
			cli.run("pub", "--jetstream", "-H", "Nats-Msg-Id:once", "mdr.v1.prompt.demo",
				`{"prompt": "two owls", "uid": "owls", "group_size": 2}`)
		}
		cli.run("pub", "mdr.v1.prompt.demo", `{"prompt": "a red sign", "grop_size": 4}`)
		cli.run("pub", "mdr.v1.prompt.demo", "a red sign")
		watched := meander(t, dir, "watch", "--run", "demo", "--kinds", "advantage", "--count", "3").must(t, 0).stdout
		for _, want := range []string{"p1", "owls", "p3"} {
			if !strings.Contains(watched, want) {
				t.Errorf("no group %s:\n%s", want, watched)
			}
		}
		letters := meander(t, dir, "dead", "ls").must(t, 0).stdout
		for _, want := range []string{
			"grop_size: unknown field; did you mean group_size?",
			"must be a map of msgpack, or JSON",
		} {
			if !strings.Contains(letters, want) {
				t.Errorf("no dead letter says %q:\n%s", want, letters)
			}
		}
		seen := cli.run("sub", "--raw", "--all", "--count", "1", "--translate", "meander decode",
			"mdr.v1.advantage.demo.owls")
		if !strings.Contains(seen, `"uid":"owls"`) || !json.Valid([]byte(seen)) {
			t.Errorf("a result as JSON: %q", seen)
		}
	})
	t.Run("shares its contexts", func(t *testing.T) {
		cli := &natsCLI{t, cli.path, cli.env}
		cli.run("context", "add", "mine", "--server", url)
		for name, want := range map[string]int{"mine": 0, "other": 2} {
			c := exec.CommandContext(limited(t), program(t, "meander"), "status", "--context", name)
			c.Env, c.Dir = cli.env, dir
			out, err := c.CombinedOutput()
			if c.ProcessState.ExitCode() != want || !strings.Contains(string(out),
				map[int]string{0: "demo", 2: ": mine"}[want]) {
				t.Errorf("status --context %s: %v\n%s", name, err, out)
			}
		}
	})
	t.Run("lists services with what they have done", func(t *testing.T) {
		showsWork(t, &natsCLI{t, cli.path, cli.env})
	})
	t.Run("says what streams and consumers are", func(t *testing.T) {
		saysWhatTheyAre(t, &natsCLI{t, cli.path, cli.env})
	})
	t.Run("copies streams to another server", func(t *testing.T) {
		copiesStreams(t, &natsCLI{t, cli.path, cli.env}, dir)
	})
	t.Run("counts what workers in Python have done", func(t *testing.T) {
		countsWorkers(t, &natsCLI{t, cli.path, cli.env}, url)
	})
	t.Run("judges and controls in JSON", func(t *testing.T) {
		judgesInJSON(t, &natsCLI{t, cli.path, cli.env}, dir)
	})
}

// judgesInJSON fails unless verdicts and controls in JSON are taken.
func judgesInJSON(t *testing.T, cli *natsCLI, dir string) {
	t.Helper()
	cli.run("pub", "mdr.v1.prompt.judged", `{"prompt": "a red sign", "uid": "u", "group_size": 2, "reward": [{"name": "external:human", "weight": 1}]}`)
	for i, value := range []string{"0.25", "0.75"} {
		at := strconv.Itoa(i)
		cli.run("pub", "mdr.v1.verdict.judged.u."+at+".human",
			`{"run": "judged", "uid": "u", "sample_index": `+at+`, "name": "human", "value": `+value+`, "author": "ann"}`)
	}
	if out := meander(t, dir, "watch", "--run", "judged", "--kinds", "advantage", "--count", "1", "--json").must(t, 0).stdout; !strings.Contains(out, `"mean":0.5`) {
		t.Errorf("judged: %s", out)
	}
	cli.run("pub", "mdr.v1.control.judged", `{"run": "judged", "action": "pause", "by": "ann", "reason": "lunch"}`)
	bustest.Until(t, "the pause", func() error {
		if out := meander(t, dir, "status", "judged").must(t, 0).stdout; !strings.Contains(out, "lunch") {
			return errors.New(out)
		}
		return nil
	})
}

// saysWhatTheyAre fails unless streams, buckets and consumers are listed with what they are for, and whose.
func saysWhatTheyAre(t *testing.T, cli *natsCLI) {
	t.Helper()
	for says, args := range map[string][]string{
		"OBJ_mdr-blobs": {"stream", "ls", "--all"}, "sampler-synthetic": {"consumer", "ls", "MDR_REQUESTS"},
		"Mdr-Type: step/1": {"sub", "mdr.v1.step.demo.>", "--headers-only", "--all", "--count", "1"},
	} {
		if out := cli.run(args...); !strings.Contains(out, says) {
			t.Errorf("%q: no %q in %s", args, says, out)
		}
	}
	for _, of := range []struct {
		args       []string
		says, owns string
	}{
		{[]string{"stream", "info", "MDR_STEPS", "--json"}, "denoising steps and tokens", "sampler"},
		{[]string{"stream", "info", "KV_mdr-control", "--json"}, "the control that holds", "intake"},
		{[]string{"stream", "info", "OBJ_mdr-blobs", "--json"}, "by their sha-256", ""},
		{[]string{"consumer", "info", "MDR_REWARDS", "advantage-p00", "--json"}, "rewards of partition 0", "advantage"},
	} {
		var info struct {
			Config struct {
				Description string            `json:"description"`
				Metadata    map[string]string `json:"metadata"`
			} `json:"config"`
		}
		out := cli.run(of.args...)
		err := json.Unmarshal([]byte(out), &info)
		c := info.Config
		if err != nil || !strings.Contains(c.Description, of.says) || c.Metadata["meander.owner"] != of.owns ||
			c.Metadata["meander.version"] != schemas.Release {
			t.Errorf("%q: %v, %+v; want %q of %q", of.args, err, c, of.says, of.owns)
		}
	}
}

// copiesStreams backs the streams up while the pipeline works, restores them on another server, and fails unless all of
// the run is there: its log-probs are computed again.
func copiesStreams(t *testing.T, cli *natsCLI, dir string) {
	t.Helper()
	to := startServer(t, server.Options{JetStream: true}).ClientURL()
	names := strings.Fields(cli.run("stream", "ls", "--names", "--all"))
	for _, name := range schemas.StreamNames() {
		if !slices.Contains(names, name) {
			t.Errorf("no stream %s in %q", name, names)
		}
	}
	backup := filepath.Join(t.TempDir(), "backup")
	for _, name := range names {
		cli.run("backup", "stream", name, filepath.Join(backup, name), "--no-progress")
		cli.run("backup", "restore", "stream", filepath.Join(backup, name), "--no-progress", "--server", to)
	}
	before := meander(t, dir, "show", "--run", "demo", "--store", "meander-data").must(t, 0).stdout
	if after := meander(t, dir, "show", "--run", "demo", "--nats", to).must(t, 0).stdout; after != before {
		t.Errorf("restored, the run is\n%s\nit was\n%s", after, before)
	}
	meander(t, dir, "verify", "--run", "demo", "--nats", to).must(t, 0)
	// Its consumers came along: the services go on where they were.
	up := exec.Command(program(t, "meander"), "up", "--model", "synthetic", "--nats", to)
	up.Dir = t.TempDir()
	if err := up.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = up.Process.Signal(os.Interrupt); _ = up.Wait() })
	cli.run("pub", "--server", to, "mdr.v1.prompt.demo", `{"prompt": "a red fox", "uid": "later", "group_size": 2}`)
	meander(t, dir, "watch", "--run", "demo", "--kinds", "advantage", "--count", "4", "--nats", to).must(t, 0)
}

// countsWorkers fails unless the workers of the Python client, and a teacher, are listed with what they have answered.
func countsWorkers(t *testing.T, cli *natsCLI, url string) {
	t.Helper()
	python := pythonWith(t, "nats, msgpack, blake3, numpy, PIL")
	teacher := exec.Command(program(t, "meander"), "teacher", "--nats", url, "--model", "synthetic", "--name", "old")
	teacher.Dir, teacher.Stderr = t.TempDir(), os.Stderr
	if err := teacher.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = teacher.Process.Signal(os.Interrupt); _ = teacher.Wait() })
	startWorker(t, "--url", url, "--name", "colour")
	c := exec.CommandContext(limited(t), python, "testdata/workers.py", url)
	c.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join(root, "pkg/client/python"), "PYTHONDONTWRITEBYTECODE=1")
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	c.Stderr = os.Stderr
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = in.Close(); _ = c.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "asked\n" {
		t.Fatalf("workers.py says %q, %v", line, err)
	}
	for _, of := range []struct {
		service, endpoint string
		requests, fail    int
	}{
		{"meander-scorer", "bright", 3, 1},
		{"meander-scorer", "colour", 2, 0},
		{"meander-interaction", "game", 2, 1},
		{"meander-teacher", "old", 2, 1},
	} {
		found := false
		dec := json.NewDecoder(strings.NewReader(cli.run("micro", "stats", of.service, "--json")))
		var all []micro.Stats
		if err := dec.Decode(&all); err != nil {
			t.Fatal(err)
		}
		for _, s := range all {
			for _, e := range s.Endpoints {
				if e.Name != of.endpoint {
					continue
				}
				found = true
				if e.NumRequests != of.requests || e.NumErrors != of.fail || e.ProcessingTime <= 0 ||
					(e.LastError != "") != (of.fail > 0) {
					t.Errorf("%s: %+v; want %d, of which %d failed", of.service, e, of.requests, of.fail)
				}
			}
		}
		if !found {
			t.Errorf("%s has no endpoint %s: %+v", of.service, of.endpoint, all)
		}
	}
}

// showsWork fails unless the services are listed, with the counts of what the prompts before were.
func showsWork(t *testing.T, cli *natsCLI) {
	t.Helper()
	listed := cli.run("micro", "ls", "--json")
	for _, service := range []string{"intake", "sampler", "reward", "advantage"} {
		if !strings.Contains(listed, `"meander-`+service+`"`) {
			t.Errorf("%s is not listed:\n%s", service, listed)
		}
	}
	for _, of := range []struct {
		service, work  string
		requests, fail int
	}{{"intake", "prompts", 4, 2}, {"sampler", "requests", 6, 0}, {"reward", "trajectories", 6, 0}} {
		var all []micro.Stats
		out := cli.run("micro", "stats", "meander-"+of.service, "--json")
		if err := json.NewDecoder(strings.NewReader(out)).Decode(&all); err != nil || len(all) != 1 {
			t.Fatalf("%s: %v\n%s", of.service, err, out)
		}
		stats := all[0]
		i := slices.IndexFunc(stats.Endpoints, func(e *micro.EndpointStats) bool { return e.Name == of.work })
		if i < 0 {
			t.Errorf("%s has no %s:\n%s", of.service, of.work, out)
			continue
		}
		e := stats.Endpoints[i]
		if e.NumRequests != of.requests || e.NumErrors != of.fail || e.ProcessingTime <= 0 {
			t.Errorf("%s: %+v; want %d, of which %d failed", of.service, e, of.requests, of.fail)
		}
	}
}
