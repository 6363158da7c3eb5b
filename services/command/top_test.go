package command

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// hostile is a prompt that would clear a terminal, rename its window, and turn a line around.
const hostile = "a fox\x1b[2J\x1b]0;mine\x07 \u009b31m \u202eand\r\na hen"

// snapshot is what 'meander top' prints at a width. No line of it is wider, and a terminal obeys none of it.
func snapshot(t *testing.T, columns int) string {
	t.Helper()
	got := expect(t, exitOK, "", "top", "--columns", fmt.Sprint(columns))
	checkLines(t, strings.Split(strings.TrimSuffix(got, "\n"), "\n"), columns)
	return got
}

// checkLines checks that no line is wider than columns, and that a terminal obeys none.
func checkLines(t *testing.T, lines []string, columns int) {
	t.Helper()
	for _, line := range lines {
		obeyed := strings.ContainsFunc(line, func(r rune) bool { return !unicode.IsPrint(r) })
		if n := present.Columns(line); n > columns || obeyed {
			t.Errorf("a line of %d columns, of %d: %q", n, columns, line)
		}
	}
}

// flat is a text in one line.
func flat(text string) string { return strings.Join(strings.Fields(text), " ") }

// A run that is done, and the pipeline that is not there, in every width and as JSON.
func TestTop(t *testing.T) {
	inStore(t)
	for _, columns := range []int{40, 60, 100, 200} {
		got := snapshot(t, columns)
		for _, want := range []string{
			"r1", "complete", "1/1", "2/2", "No sampler and no reward service is running",
			"do: Start the pipeline: 'meander up'", "no stream is nearly full", "no dead letters",
		} {
			if !strings.Contains(flat(got), want) {
				t.Errorf("%d columns: %q is not in\n%s", columns, want, got)
			}
		}
	}
	if got := expect(t, exitOK, "", "top"); got[:len("meander top")] != "meander top" {
		t.Errorf("without a terminal:\n%s", got)
	}
	x := linesOf(t, expect(t, exitOK, "", "top", "--json"))[0]
	run := x["runs"].([]any)[0].(map[string]any)
	stages := run["progress"].(map[string]any)["stages"].([]any)
	if run["run"] != "r1" || len(stages) != 4 || x["total"] != 1.0 || x["dead"] != 0.0 {
		t.Errorf("JSON %v", x)
	}
	expect(t, exitUsage, "--columns: 39; must be from 40 to 1000, or 0", "top", "--columns", "39")
	expect(t, exitUsage, "takes no arguments", "top", "now")
	expect(t, exitFailed, "is the server up?", "top", "--nats", "nats://127.0.0.1:1")
	inEmptyDir(t)
	expect(t, exitUsage, "is empty; make a rollout first", "top")
}

// What waits is said with its fix, of the pipeline and of a run. A store without runs says how to make one.
func TestTop_Waits(t *testing.T) {
	inEmptyDir(t)
	serving(t, "--model", "synthetic")
	if got := flat(snapshot(t, 60)); !strings.Contains(got, "no run is stored yet") ||
		!strings.Contains(got, "meander publish --run demo") {
		t.Errorf("without runs: %s", got)
	}
	line := fmt.Appendf(nil, `{"prompt": %s, "uid": "h", "reward": [{"name": "external"}]}`, quoteJSON(t, hostile))
	if err := os.WriteFile("h.jsonl", line, 0o600); err != nil {
		t.Fatal(err)
	}
	expect(t, exitOK, "", "publish", "--run", "judged", "-n", "2", "--steps", "2", "--deadline", "1h", "-f", "h.jsonl")
	for _, columns := range []int{60, 200} {
		bustest.Until(t, "what the run waits for", func() error {
			got := snapshot(t, columns)
			for _, want := range []string{
				"judged", "waiting for a verdict", "0/1", "2/2", "judged: 2 samples wait for a verdict",
				"do: give it with: meander verdict --run judged", "lane synthetic: version", "1 sampler", "░", "█",
			} {
				if !strings.Contains(flat(got), want) {
					return fmt.Errorf("%d columns: %q is not in\n%s", columns, want, got)
				}
			}
			return nil
		})
	}
}

// The screen has its height and its width, whatever is stored: the chosen run is in it, and prompts are only text.
func TestTop_Screen(t *testing.T) {
	wait := outcomes.Wait{Grave: true, Says: strings.Repeat("long ", 40) + "end", Fix: strings.Repeat("x", 90)}
	overview := &view.Overview{Total: 90, System: &view.System{Waits: []outcomes.Wait{wait}}}
	for i := range 30 {
		r := lineOf(fmt.Sprintf("run-%d-%s", i, strings.Repeat("n", 60)))
		r.Progress = &view.Progress{State: "running", Stages: []view.Stage{
			{Name: "intake", Done: 4, Of: 4},
			{Name: "sampler", Done: 3, Of: 16},
			{Name: "reward", Done: 0, Of: 16},
			{Name: "advantage", Done: 20000, Of: 20000},
		}}
		overview.Runs = append(overview.Runs, r)
	}
	v := topView{where: "nats://" + strings.Repeat("host.", 60), now: time.Now()}
	checkScreen(t, &v) // before anything is read
	v.update(topLook{overview: overview})
	for range 17 {
		v.press(keyDown)
	}
	for _, size := range checkScreen(t, &v) {
		if !strings.Contains(size, "> run-17") {
			t.Errorf("the chosen run is not on\n%s", size)
		}
		if !strings.Contains(flat(size), "end") || strings.Count(size, "x") < 90 {
			t.Errorf("what waits is cut:\n%s", size)
		}
	}
	v.update(topLook{err: fmt.Errorf("lost %s", hostile)})
	for _, size := range checkScreen(t, &v) {
		if !strings.Contains(size, "trying again: lost a fox") {
			t.Errorf("after a failure:\n%s", size)
		}
	}
	v.away = true
	for _, size := range checkScreen(t, &v) {
		if !strings.Contains(size, "reconnecting: the server is away") || !strings.Contains(size, "> run-17") {
			t.Errorf("while the server is away:\n%s", size)
		}
	}
	overview.Runs = overview.Runs[3:] // others went: the choice stays
	v.update(topLook{overview: overview})
	if v.chosen != 14 || !v.press(keyEnter) || v.opened != overview.Runs[14].Run {
		t.Fatalf("chosen %d, opened %q", v.chosen, v.opened)
	}
	checkScreen(t, &v)
	v.update(topLook{overview: overview, run: v.opened, groups: &view.Groups{Total: 25, Rows: []view.GroupRow{
		{UID: "u1", Status: "open", Prompt: hostile},
		{UID: "u2", Status: "complete", Mean: new(0.5), Prompt: strings.Repeat("狐", 200)},
	}}})
	for _, size := range checkScreen(t, &v) {
		for _, want := range []string{"the newest 2 of 25", "0.5000", "u1", "a fox"} {
			if !strings.Contains(size, want) {
				t.Errorf("%q is not on\n%s", want, size)
			}
		}
	}
	if v.press(keyBack); v.opened != "" {
		t.Error("esc does not go back")
	}
}

// checkScreen lays a view out at several sizes, and returns the screens.
func checkScreen(t *testing.T, v *topView) (screens []string) {
	t.Helper()
	for _, size := range [][2]int{{60, 20}, {80, 24}, {200, 50}} {
		var lines []string
		for _, l := range v.layOut(size[0], size[1]) {
			lines = append(lines, l.text)
		}
		if len(lines) != size[1] {
			t.Errorf("%v: %d lines", size, len(lines))
		}
		checkLines(t, lines, size[0])
		screens = append(screens, strings.Join(lines, "\n"))
	}
	return screens
}

// Keys are read as terminals send them; all others have no effect.
func TestTop_Keys(t *testing.T) {
	for sent, want := range map[string][]key{
		"q": {keyQuit}, "\x03": {keyQuit}, "\x1b[A\x1bOB": {keyUp, keyDown}, "\x1b": {keyBack}, "\r": {keyEnter},
		"jk":        {keyDown, keyUp},
		"\x1b[1;5A": {keyUp}, "\x1b[3~x": nil, "\x1b[": nil, "\x1b[200": nil, "\x1b\x1b[B": {keyBack, keyDown}, "": nil,
	} {
		if got := keysOf([]byte(sent)); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%q: %v, want %v", sent, got, want)
		}
	}
}

// quoteJSON is a text in JSON.
func quoteJSON(t *testing.T, text string) []byte {
	t.Helper()
	data, err := json.Marshal(text)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// lineOf is a run in the list.
func lineOf(run string) *view.Run {
	return &view.Run{Run: schemas.Run(run), State: schemas.RunRunning}
}
