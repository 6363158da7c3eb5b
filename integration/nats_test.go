package integration_test

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

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
			case !json.Valid([]byte(dry)) || !receipt.Accepted && receipt.Waiting == "" || receipt.Accepted && receipt.Samples != 8:
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
		for _, want := range []string{"grop_size: unknown field; did you mean group_size?", "must be a map of msgpack, or JSON"} {
			if !strings.Contains(letters, want) {
				t.Errorf("no dead letter says %q:\n%s", want, letters)
			}
		}
		seen := cli.run("sub", "--raw", "--all", "--count", "1", "--translate", "meander decode", "mdr.v1.advantage.demo.owls")
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
			if c.ProcessState.ExitCode() != want || !strings.Contains(string(out), map[int]string{0: "demo", 2: ": mine"}[want]) {
				t.Errorf("status --context %s: %v\n%s", name, err, out)
			}
		}
	})
	t.Run("lists services with what they have done", func(t *testing.T) {
		showsWork(t, &natsCLI{t, cli.path, cli.env})
	})
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
