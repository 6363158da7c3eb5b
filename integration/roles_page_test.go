package integration_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"regexp"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// visitor is a browser, without or with the link that the command printed.
type visitor struct {
	t    *testing.T
	http *http.Client
	page string
}

func visit(t *testing.T, page string) *visitor {
	t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	v := &visitor{t, &http.Client{Jar: jar, Transport: &http.Transport{}}, regexp.MustCompile(`\?.*`).ReplaceAllString(page, "")}
	t.Cleanup(v.http.CloseIdleConnections)
	v.do("GET", strings.TrimPrefix(page, v.page))
	return v
}

// do returns the status and the text of an answer.
func (v *visitor) do(method, path string) (int, string) {
	v.t.Helper()
	r, err := http.NewRequestWithContext(v.t.Context(), method, v.page+path, nil)
	if err != nil {
		v.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	answer, err := v.http.Do(r)
	if err != nil {
		v.t.Fatal(err)
	}
	defer answer.Body.Close()
	if answer.Header.Get("Content-Type") == "text/event-stream" { // which does not end
		return answer.StatusCode, ""
	}
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		v.t.Fatal(err)
	}
	return answer.StatusCode, string(body)
}

// link is the address that a command says its page is at.
func (x *task) link(t *testing.T) string {
	t.Helper()
	x.says(t, "Ctrl-C ends it")
	return regexp.MustCompile(`http://[^\s;]+`).FindString(x.stderr.String())
}

// Where the pipeline asks for credentials, its page does not pass that by: who has the token does what the role of the
// page may, and others of the machine see and do nothing.
func TestRoles_Page(t *testing.T) {
	t.Parallel()
	letter := func(g guarded) {
		admin := g.bus(t, "admin")
		m := &bus.Message{
			Subject: schemas.PromptSubject("r1"), Stream: schemas.StreamPrompts, Seq: 1,
			Data: bustest.Encode(t, &schemas.Prompt{UID: "p", Prompt: "a secret fox"}),
		}
		if err := admin.Dead(t.Context(), schemas.ServiceIntake, schemas.CodeInvalid, "why", m); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		user string
		more []string
		up   bool
		// drop is what an attempt to drop a dead letter is answered with, and how.
		drop int
		says string
	}{
		{"viewer", []string{"--ui"}, true, 405, "start it with --admin"},
		{"admin", []string{"--ui", "--ui-admin"}, true, 200, "dropped"},
		{"viewer", nil, false, 405, "start it with --admin"},
		{"viewer", []string{"--admin"}, false, 403, "the roles that may are"},
		{"admin", []string{"--admin"}, false, 200, "dropped"},
	} {
		t.Run(fmt.Sprint(c.user, c.more), func(t *testing.T) {
			var page *task
			dir, store := credentials(t), t.TempDir()
			args := []string{"up", "--model", "synthetic", "--listen", "127.0.0.1:0", "--auth", dir}
			if c.up {
				args = append(append(args, "--ui-listen", "127.0.0.1:0"), c.more...)
			}
			up := background(t, store, args...)
			up.says(t, "meander is up on")
			g := guarded{strings.Replace(running(t, store).URL, "nats://", "tls://", 1), dir, up.stderr.String}
			if page = up; !c.up {
				page = background(t, t.TempDir(), append(append([]string{"ui", "--listen", "127.0.0.1:0"}, c.more...),
					g.flags(c.user)...)...)
			}
			letter(g)
			link := page.link(t)
			stranger, guest := visit(t, regexp.MustCompile(`\?.*`).ReplaceAllString(link, "")), visit(t, link)
			for _, path := range []string{
				"", "api/runs", "api/page", "api/dead", "api/dead/1", "api/events",
				"media/r/u/0/image", "app.js",
			} {
				if status, body := stranger.do("GET", path); status != http.StatusUnauthorized ||
					strings.Contains(body, "fox") {
					t.Errorf("who has no token gets of /%s: %d %s", path, status, body)
				}
			}
			if status, body := stranger.do("POST", "api/dead/1/drop"); status != http.StatusUnauthorized {
				t.Errorf("who has no token drops a letter: %d %s", status, body)
			}
			if status, body := guest.do("GET", "api/dead/1"); status != http.StatusOK ||
				!strings.Contains(body, "a secret fox") {
				t.Errorf("who has the token reads a letter: %d %s", status, body)
			}
			if status, body := guest.do("POST", "api/dead/1/drop"); status != c.drop ||
				!strings.Contains(body, c.says) {
				t.Errorf("who has the token drops a letter: %d %s", status, body)
			}
			_, token, _ := strings.Cut(link, "token=")
			if n := strings.Count(page.stderr.String()+page.stdout.String(), token); n != 1 {
				t.Errorf("the token is printed %d times", n)
			}
		})
	}
}
