package integration_test

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// block is a fenced block of a document.
type block struct {
	line       int
	kind, text string
	// skip is why the block is not run: the document says so in a comment before it, which readers do not see.
	skip string
}

var (
	fence  = regexp.MustCompile("^ *```(\\S*) *$")
	marked = regexp.MustCompile(`^<!-- (not run|run by): (.+) -->$`)
)

// blocksOf are the fenced blocks of a document, in order.
func blocksOf(t *testing.T, name, text string) (blocks []block) {
	t.Helper()
	var open *block
	skip := ""
	for i, line := range strings.Split(text, "\n") {
		m := fence.FindStringSubmatch(line)
		switch {
		case open == nil && m != nil:
			open = &block{line: i + 1, kind: m[1], skip: skip}
		case open != nil && m != nil:
			blocks, open = append(blocks, *open), nil
		case open != nil:
			open.text += strings.TrimSpace(line) + "\n"
		}
		skip = ""
		if m := marked.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
			if skip = m[2]; m[1] == "run by" && !integrationTest(t, m[2]) {
				t.Errorf("%s:%d: there is no %s", name, i+1, m[2])
			}
		}
	}
	if open != nil {
		t.Errorf("%s:%d: the block does not end", name, open.line)
	}
	return blocks
}

// integrationTest says whether a test of this package has the name.
func integrationTest(t *testing.T, name string) bool {
	t.Helper()
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(files, func(file string) bool {
		data, err := os.ReadFile(file)
		return err == nil && bytes.Contains(data, []byte("func "+name+"(t *testing.T)"))
	})
}

// preamble is how a shell runs the blocks of one document. Programs that are started in the background have said
// something before the next line runs; those that a reader ends with Ctrl-C are ended with it once they have.
const preamble = `
set -eE -o pipefail
trap 'echo "@@ status $? of: $BASH_COMMAND"' ERR
jobs=0
started() { # pid, what: waits until the job has written that
	until grep -qs "$2" "job.$jobs"; do
		kill -0 "$1" 2>/dev/null || { cat "job.$jobs"; echo "@@ the job ended at once"; exit 1; }
		sleep 0.02
	done
}
interrupt() {
	kill -INT "$!"
	local status=0
	wait "$!" || status=$?
	cat "job.$jobs"
	[ "$status" = 0 ] || [ "$status" = 130 ] || { echo "@@ status $status after Ctrl-C"; exit 1; }
}
end() { # what a document leaves in the background
	trap - ERR
	local job
	for job in $(jobs -p); do kill -- "-$job" 2>/dev/null || true; done
	wait || true
}
trap end EXIT
`

var (
	inBackground = regexp.MustCompile(`^(.*\S)\s*&\s*(?:#.*)?$`)
	killJob      = regexp.MustCompile(`^kill ((?:%\d ?)+)$`)
	untilCtrlC   = regexp.MustCompile(`^(.*\S)\s+#.*Ctrl-C ends.*$`)
)

// script is what a shell runs for a block. Lines stay as they are, but for those that do not end by themselves.
func (b block) script() string {
	var s strings.Builder
	fmt.Fprintf(&s, "echo; echo '@@ begin %d'\n", b.line)
	for _, line := range strings.Split(b.text, "\n") {
		run := func(command, then string) {
			if !strings.Contains(command, "&") {
				command = "exec " + command // a signal to the job is one to the program
			}
			says := "."
			if strings.Contains(command, "meander up") || strings.Contains(command, "meander-sampler") {
				says = "model ready"
			}
			fmt.Fprintf(&s, "jobs=$((jobs + 1)); set -m; { %s; } >job.$jobs 2>&1 </dev/null &\n", command)
			fmt.Fprintf(&s, "set +m; started $! '%s'%s\n", says, then)
		}
		if m := untilCtrlC.FindStringSubmatch(line); m != nil {
			run(m[1], "; interrupt")
		} else if m := killJob.FindStringSubmatch(line); m != nil {
			fmt.Fprintf(&s, "%s\nwait %s || true\n", line, m[1])
		} else if m := inBackground.FindStringSubmatch(line); m != nil {
			run(m[1], "")
		} else {
			s.WriteString(line + "\n")
		}
	}
	fmt.Fprintf(&s, "echo; echo '@@ end %d'\n", b.line)
	return s.String()
}

// workplace is a folder in which a reader of a document stands: the repository with its programs, and nothing stored.
// Programs that would listen on a port of their own choice listen on the address instead.
func workplace(t *testing.T) (dir, address string) {
	t.Helper()
	dir, address = t.TempDir(), harness.FreeAddress(t)
	repository, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(repository)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if tracked := !slices.Contains([]string{".git", "bin", "build", "meander-data", "meander-out"},
			e.Name()); tracked {
			if err := os.Symlink(filepath.Join(repository, e.Name()), filepath.Join(dir, e.Name())); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	wrap := func(name, script string) {
		if err := harness.WriteProgram(filepath.Join(dir, "bin", name), []byte("#!/bin/sh\n"+script+"\n")); err != nil {
			t.Fatal(err)
		}
	}
	wrap("meander", fmt.Sprintf(`case "$1 $* " in
"up "*" --listen "* | "up "*" --nats "*) ;;
"up "*) shift; set -- up --listen %s "$@" ;;
esac
exec %q "$@"`, address, program(t, "meander")))
	for _, service := range []string{"meander-intake", "meander-sampler", "meander-reward", "meander-advantage"} {
		wrap(service, fmt.Sprintf(`export MEANDER_NATS_URL=${MEANDER_NATS_URL:-nats://%s}
exec %q --health-addr 127.0.0.1:0 "$@"`, address, program(t, service)))
	}
	host, port, _ := strings.Cut(address, ":")
	wrap("nats-server", fmt.Sprintf("exec %q --addr %s --port %s \"$@\"", harness.ServerProgram(t), host, port))
	wrap("python", fmt.Sprintf("export MEANDER_NATS_URL=${MEANDER_NATS_URL:-nats://%s} PYTHONPATH=pkg/client/python\n"+
		"exec %q \"$@\"", address, cmp.Or(os.Getenv("MEANDER_PYTHON"), "python3")))
	make, err := exec.LookPath("make")
	if err != nil {
		t.Fatal(err)
	}
	wrap("make", make+" -o build \"$@\"") // the programs are there
	return dir, address
}

// Every block of shell commands of every document runs as it is written, in order, in one folder for each document, and
// ends without a fault. A block without a language that follows shows what it prints. What cannot run says why not in a
// comment before the block: <!-- not run: it needs Docker -->, or which test runs it: <!-- run by: TestReading -->.
func TestDocs_BlocksRun(t *testing.T) {
	if raceEnabled {
		t.Skip("the programs run without the race detector here: the documents start a hundred of them")
	}
	t.Parallel()
	ran := 0
	docs := documents(t)
	for _, name := range slices.Sorted(maps.Keys(docs)) {
		var toRun []block
		for _, b := range blocksOf(t, name, docs[name]) {
			switch {
			case b.skip != "":
				t.Logf("%s:%d: not run here: %s", name, b.line, b.skip)
			case b.kind == "text": // a form, not what something prints
			case b.kind != "sh" && b.kind != "":
				t.Errorf(
					"%s:%d: a block of %s; a comment before it must say what runs it, or why nothing does", name,
					b.line, b.kind)
			default:
				toRun = append(toRun, b)
			}
		}
		if len(toRun) == 0 {
			continue
		}
		ran++
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, fault := range runBlocks(t, toRun) {
				t.Errorf("%s:%s", name, fault)
			}
		})
	}
	if ran < 3 {
		t.Errorf("%d documents have blocks to run; the patterns are broken", ran)
	}
}

// runBlocks runs the blocks of one document and says at which line one fails, or prints something else than is shown.
func runBlocks(t *testing.T, blocks []block) (faults []string) {
	t.Helper()
	// Where the tests run in the background Ctrl-C is ignored, and programs inherit that.
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	defer signal.Stop(interrupts)
	dir, address := workplace(t)
	script := preamble
	for _, b := range blocks {
		if b.kind == "sh" {
			script += b.script()
		}
	}
	script = strings.ReplaceAll(script, "127.0.0.1:4222", address)
	ctx, cancel := context.WithTimeout(t.Context(), 5*bustest.Patience)
	defer cancel()
	c := exec.CommandContext(ctx, "bash", "-c", script)
	c.Dir = dir
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "MEANDER_") && !strings.HasPrefix(v, "MAKE") {
			c.Env = append(c.Env, v)
		}
	}
	c.Env = append(c.Env, "PATH="+filepath.Join(dir, "bin")+":"+os.Getenv("PATH"))
	c.WaitDelay = bustest.Patience
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGTERM) }
	out, err := c.CombinedOutput()
	printed := map[int]string{}
	at := 0
	for _, line := range strings.SplitAfter(string(out), "\n") {
		if _, scanErr := fmt.Sscanf(line, "@@ begin %d", &at); scanErr != nil {
			printed[at] += line
		}
	}
	if err != nil {
		jobs, _ := filepath.Glob(filepath.Join(dir, "job.*"))
		for _, job := range jobs {
			said, _ := os.ReadFile(job)
			printed[at] += fmt.Sprintf("@@ %s\n%s", filepath.Base(job), said[max(0, len(said)-1000):])
		}
		return []string{fmt.Sprintf("%d: %v\n%s", at, err, printed[at])}
	}
	last := 0
	for _, b := range blocks {
		if b.kind == "sh" {
			last = b.line
			continue
		}
		for _, line := range strings.Split(strings.TrimSpace(b.text), "\n") {
			if !shows(printed[last], line) {
				fault := fmt.Sprintf("%d: the block before does not print %q; it prints\n%s", b.line, line,
					printed[last])
				faults = append(faults, fault)
				break
			}
		}
	}
	return faults
}

// shows says whether a line of the output has all words of another, in their order.
func shows(output, want string) bool {
	return slices.ContainsFunc(strings.Split(output, "\n"), func(line string) bool {
		words := strings.Fields(want)
		for _, w := range strings.Fields(line) {
			if len(words) > 0 && w == words[0] {
				words = words[1:]
			}
		}
		return len(words) == 0
	})
}

// A block that fails is found, by its line; so is a job that ends at once, and output that is not as shown.
func TestBlocks_Faults(t *testing.T) {
	t.Parallel()
	const fence = "```"
	for name, c := range map[string]struct{ text, fault string }{
		"in order":        {"sh\necho kept > file\n%sh\ncat file | tr k K\n%\nKept\n%", ""},
		"a job":           {"sh\nbash -c 'echo hello; sleep 600' &\nkill %%1\n%", ""},
		"Ctrl-C":          {"sh\nbash -c 'echo hello; sleep 600'   # it waits; Ctrl-C ends it\n%", ""},
		"a status":        {"sh\ntrue\nfalse\n%", "1: exit status 1"},
		"in a pipe":       {"sh\nfalse | cat\n%", "1: exit status 1"},
		"a job that ends": {"sh\nfalse &\n%", "the job ended at once"},
		"other output":    {"sh\necho mean reward 0.5\n%\nmean reward 0.6\n%", `4: the block before does not print "mean`},
		"another order":   {"sh\necho two one\n%\none two\n%", `4: the block before does not print "one two"`},
		"part of it":      {"sh\necho mean reward   0.5 of 4\n%\nmean reward of 4\n%", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text := strings.ReplaceAll(strings.ReplaceAll(c.text, "%%", "\x00"), "\n%", "\n"+fence+"\n"+fence)
			text = strings.ReplaceAll(strings.TrimSuffix(fence+text, fence), "\x00", "%")
			got := strings.Join(runBlocks(t, blocksOf(t, name, text)), "\n")
			if (got == "") != (c.fault == "") || !strings.Contains(got, c.fault) {
				t.Errorf("%s\ngives %q, want %q", text, got, c.fault)
			}
		})
	}
}
