// Package integration_test runs the whole pipeline: real binaries, a real NATS
// server, real files.
package integration_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/natsd"
)

func TestMain(m *testing.M) {
	flag.Parse()
	// These tests wait for processes and timers more than they compute.
	if n := flag.Lookup("test.parallel"); n.Value.String() == n.DefValue {
		_ = n.Value.Set(strconv.Itoa(2 * runtime.GOMAXPROCS(0)))
	}
	m.Run()
}

// output is what one command line did.
type output struct {
	stdout, stderr string
	code           int
}

// meander runs the command line to its end.
func meander(t *testing.T, dir string, args ...string) output {
	t.Helper()
	return background(t, dir, args...).wait(t)
}

// serve runs a pipeline of the synthetic model on the store of dir until the test ends.
func serve(t *testing.T, dir string) natsd.Info {
	t.Helper()
	return serveModel(t, dir, "synthetic")
}

// serveModel is serve with a model.
func serveModel(t *testing.T, dir, model string) natsd.Info {
	t.Helper()
	up := exec.Command(program(t, "meander"), "up", "--model", model, "--listen", "127.0.0.1:0")
	up.Dir = dir
	if err := up.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = up.Process.Signal(os.Interrupt)
		_ = up.Wait()
	})
	return running(t, dir)
}

// running waits until somebody serves the store of dir.
func running(t *testing.T, dir string) (info natsd.Info) {
	t.Helper()
	bustest.Until(t, "meander up", func() error {
		var ok bool
		if info, ok = natsd.Running(filepath.Join(dir, "meander-data")); !ok || info.URL == "" {
			return errors.New("does not serve")
		}
		return nil
	})
	return info
}

// must fails the test unless the command ended with the status.
func (o output) must(t *testing.T, code int) output {
	t.Helper()
	if o.code != code {
		t.Fatalf("exit status %d, want %d\nstdout:\n%s\nstderr:\n%s", o.code, code, o.stdout, o.stderr)
	}
	return o
}

type member struct {
	SampleIndex int64      `json:"sample_index"`
	Status      string     `json:"status"`
	Reward      *float64   `json:"reward"`
	Advantage   *float64   `json:"advantage"`
	LogProbs    []*float64 `json:"log_probs"`
	Transitions []string   `json:"transitions"`
	Latents     []int64    `json:"latent_step_indices"`
	Image       string     `json:"image"`
	Scores      []struct {
		Value   *float64 `json:"value"`
		Members int64    `json:"members"`
		Detail  string   `json:"detail"`
		Error   string   `json:"error"`
	} `json:"scores"`
}

type group struct {
	Std     *float64 `json:"std"`
	UID     string   `json:"uid"`
	Prompt  string   `json:"prompt"`
	Status  string   `json:"status"`
	Error   string   `json:"error"`
	Members []member `json:"members"`
}

type summary struct {
	Refills      int    `json:"refills"`
	Run          string `json:"run"`
	Groups       int    `json:"groups"`
	Complete     int    `json:"complete"`
	Refused      int    `json:"refused"`
	Samples      int    `json:"samples"`
	Trajectories int    `json:"trajectories"`
	StepsStored  int    `json:"steps_stored"`
	Digest       string `json:"digest"`

	Metrics map[string]float64 `json:"metrics"`
}

// parse reads run's --json output.
func (o output) parse(t *testing.T) ([]group, summary) {
	t.Helper()
	var groups []group
	var last struct {
		Summary *summary `json:"summary"`
	}
	lines := bufio.NewScanner(strings.NewReader(o.stdout))
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		if last.Summary != nil {
			t.Fatalf("output after the summary: %s", lines.Text())
		}
		if err := json.Unmarshal(lines.Bytes(), &last); err != nil {
			t.Fatalf("not JSON: %v\n%s", err, lines.Text())
		}
		if last.Summary != nil {
			continue
		}
		var g group
		if err := json.Unmarshal(lines.Bytes(), &g); err != nil {
			t.Fatalf("not a group: %v\n%s", err, lines.Text())
		}
		groups = append(groups, g)
	}
	if last.Summary == nil {
		t.Fatalf("no summary in:\n%s\nstderr:\n%s", o.stdout, o.stderr)
	}
	return groups, *last.Summary
}
