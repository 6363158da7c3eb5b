package integration_test

import (
	"encoding/json"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/services/ui"
)

// A guest who looks at a healthy pipeline finds no fault: it sees copies of the streams, in an account of its own, and
// neither services nor their consumers, which doctor, top and the page say or leave out.
func TestRoles_GuestLooks(t *testing.T) {
	t.Parallel()
	g := servers()["up"](t)
	meander(t, t.TempDir(), append([]string{"run", "--run", "a", "--out", "-", "a red fox"}, g.flags("trainer")...)...).must(t, 0)
	areas := []string{"streams", "consumers", "limits", "services", "policies"} // others depend on how busy a machine is
	for _, guest := range []string{"viewer-a", "trainer-a"} {
		var findings []ui.Finding
		out := meander(t, t.TempDir(), append([]string{"doctor", "--json"}, g.flags(guest)...)...)
		for line := range strings.Lines(out.stdout) {
			var f ui.Finding
			if err := json.Unmarshal([]byte(line), &f); err != nil {
				t.Fatalf("%v: %s", err, line)
			}
			findings = append(findings, f)
		}
		page := background(t, t.TempDir(), append([]string{"ui", "--listen", "127.0.0.1:0"}, g.flags(guest)...)...)
		page.says(t, "Ctrl-C ends it")
		url := regexp.MustCompile(`http://\S+/`).FindString(page.stderr.String())
		var checked struct{ Findings []ui.Finding }
		fetch(t, url+"api/doctor", &checked)
		for _, f := range append(findings, checked.Findings...) {
			if slices.Contains(areas, f.Area) && f.State != "ok" && f.State != "not checked" {
				t.Errorf("%s: %+v", guest, f)
			}
		}
		for _, area := range []string{"streams", "consumers", "services"} {
			unchecked := func(f ui.Finding) bool { return f.Area == area && f.State == "not checked" }
			if !slices.ContainsFunc(findings, unchecked) || !slices.ContainsFunc(checked.Findings, unchecked) {
				t.Errorf("%s: what it cannot see of the %s must be not checked: %+v", guest, area, findings)
			}
		}
		var runs struct{ Waits []view.Wait }
		if fetch(t, url+"api/runs", &runs); len(runs.Waits) > 0 {
			t.Errorf("%s: the page says %+v", guest, runs.Waits)
		}
		top := meander(t, t.TempDir(), append([]string{"top", "--once"}, g.flags(guest)...)...).must(t, 0).stdout
		if !strings.Contains(top, "WHAT WAITS\nnothing\n") || strings.Contains(top, "to do") {
			t.Errorf("%s: top says\n%s", guest, top)
		}
	}
}

// fetch reads JSON of a page.
func fetch(t *testing.T, url string, into any) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err == nil {
		err = json.Unmarshal(body, into)
	}
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Fatalf("GET %s: %s %v %s", url, answer.Status, err, body)
	}
}
