package ui_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/ui"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// served is a page of a pipeline.
type served struct {
	*bustest.Plane
	url  string
	http *http.Client
	// stop ends the page, and waits until it has ended.
	stop func()
}

// servePage serves a page on an event plane, without any service.
func servePage(t *testing.T, change func(*ui.Config), server ...func(*natsd.Options)) *served {
	t.Helper()
	s := &served{Plane: bustest.New(t, server...), http: &http.Client{Transport: &http.Transport{}}}
	t.Cleanup(s.http.CloseIdleConnections)
	s.serve(t, change)
	return s
}

// serve serves the page, again after it was stopped.
func (s *served) serve(t *testing.T, change func(*ui.Config)) {
	t.Helper()
	c := ui.DefaultConfig()
	if c.Listen = "127.0.0.1:0"; change != nil {
		change(&c)
	}
	ctx, end := context.WithCancel(context.Background())
	ready, ended := make(chan string, 1), make(chan error, 1)
	go func() { ended <- ui.Serve(ctx, s.Connect(t), c, zerolog.Nop(), func(url string) { ready <- url }) }()
	s.url = bustest.Receive(t, "the page", ready)
	once := make(chan struct{}, 1)
	s.stop = func() {
		select {
		case once <- struct{}{}:
			end()
			if err := bustest.Receive(t, "the end of the page", ended); err != nil {
				t.Errorf("the page ended with %v", err)
			}
		default:
		}
	}
	t.Cleanup(func() { s.stop() })
}

// startPipeline starts all services, with images in closed form.
func (s *served) startPipeline(t *testing.T) *bustest.Service {
	t.Helper()
	config := pipeline.DefaultConfig()
	config.Sampler.Model = "synthetic"
	return s.Serve(
		t,
		func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, config, zerolog.Nop()) },
	)
}

// publish sends a small prompt of two samples.
func (s *served) publish(t *testing.T, run schemas.Run, uid schemas.UID, text string, change func(*schemas.Prompt)) {
	t.Helper()
	p := &schemas.Prompt{
		UID: uid, Prompt: text, Seed: new(int64(5)), GroupSize: new(int64(2)),
		ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(3)), Height: new(int64(64)), Width: new(int64(64)),
			Rollout: schemas.Rollout{SDEStepIndices: []int64{1}},
		},
	}
	if change != nil {
		change(p)
	}
	if _, err := client.New(s.Bus).Publish(t.Context(), run, p); err != nil {
		t.Fatal(err)
	}
}

// ask sends a request and returns status, headers and body of the answer.
func (s *served) ask(t *testing.T, method, path string, change func(*http.Request)) (int, http.Header, []byte) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, strings.TrimSuffix(s.url, "/")+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(r)
	}
	answer, err := s.http.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, answer.Header, body
}

// get asks the API, and decodes the answer.
func get[T any](t *testing.T, s *served, path string) (v T) {
	t.Helper()
	status, header, body := s.ask(t, "GET", "/api/"+path, nil)
	if status != http.StatusOK || header.Get("Content-Type") != "application/json" {
		t.Fatalf("GET %s: %d %s %s", path, status, header.Get("Content-Type"), body)
	}
	if err := json.Unmarshal(body, &v); err != nil {
		t.Fatalf("GET %s: %v in %s", path, err, body)
	}
	return v
}

type object = map[string]any

// Every answer keeps the browser from executing what is shown, and from loading anything from elsewhere.
func TestServe_Headers(t *testing.T) {
	s := servePage(t, nil)
	for _, path := range []string{"/", "/app.js", "/api/runs", "/api/nothing", "/media/r/u/0/image", "/nothing"} {
		_, header, _ := s.ask(t, "GET", path, nil)
		policy := header.Get("Content-Security-Policy")
		if !strings.Contains(policy, "default-src 'none'") || strings.Contains(policy, "unsafe") ||
			strings.Contains(policy, "http") {
			t.Errorf("%s has the policy %q", path, policy)
		}
		for name, want := range map[string]string{
			"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
			"Cross-Origin-Resource-Policy": "same-origin",
		} {
			if got := header.Get(name); got != want {
				t.Errorf("%s has %s %q, want %q", path, name, got, want)
			}
		}
	}
	for _, method := range []string{"POST", "PUT", "DELETE", "PATCH", "OPTIONS"} {
		if status, _, _ := s.ask(t, method, "/api/runs", nil); status != http.StatusMethodNotAllowed {
			t.Errorf("%s is answered with %d", method, status)
		}
	}
}

// All that the page loads is there, with its type, and nothing is from elsewhere.
func TestServe_Files(t *testing.T) {
	s := servePage(t, nil)
	types := map[string]string{
		".js":   "text/javascript",
		".css":  "text/css",
		".svg":  "image/svg+xml",
		".html": "text/html",
	}
	seen, todo := map[string]bool{}, []string{"index.html"}
	names := regexp.MustCompile(`(?:src|href)="([^"#][^"]*)"|from "(\./[^"]+)"`)
	for len(todo) > 0 {
		name := todo[0]
		if todo = todo[1:]; seen[name] {
			continue
		}
		seen[name] = true
		path := "/" + name
		if name == "index.html" {
			path = "/"
		}
		status, header, body := s.ask(t, "GET", path, nil)
		if want := types[filepath.Ext(name)]; status != http.StatusOK ||
			!strings.HasPrefix(header.Get("Content-Type"), want) {
			t.Errorf("%s: %d %s, want %s", name, status, header.Get("Content-Type"), want)
		}
		own := !strings.HasPrefix(name, "vendor/")
		for _, bad := range []string{
			"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
			"https://",
		} {
			if own && bytes.Contains(body, []byte(bad)) {
				t.Errorf("%s has %q", name, bad)
			}
		}
		for _, m := range names.FindAllSubmatch(body, -1) {
			if found := strings.TrimPrefix(string(m[1])+string(m[2]), "./"); own {
				todo = append(todo, found)
			}
		}
	}
	if !seen["vendor/uplot.js"] || !seen["samples.js"] || !seen["style.css"] {
		t.Errorf("the page loads %v", seen)
	}
	if _, err := os.Stat("page/vendor/uplot-LICENSE"); err != nil {
		t.Error(err)
	}
}

// Only names and addresses of the page are answered: a site elsewhere cannot give its own name our address.
func TestServe_Host(t *testing.T) {
	s := servePage(t, func(c *ui.Config) { c.Hosts = []string{"rollouts.example.org"} })
	for host, want := range map[string]int{
		"localhost:4280": 200, "LOCALHOST": 200, "127.0.0.1:1": 200, "[::1]:4280": 200, "10.1.2.3": 200,
		"Rollouts.Example.org:443": 200,
		"evil.example":             421, "127.0.0.1.evil.example:4280": 421, "localhost.evil.example": 421, "": 200,
		"localhost:4280:1": 421,
	} {
		if status, _, body := s.ask(t, "GET", "/api/runs", func(r *http.Request) { r.Host = host }); status != want {
			t.Errorf("Host %q: %d, want %d: %s", host, status, want, body)
		}
	}
}

// Beyond this machine a token is asked for.
func TestServe_Password(t *testing.T) {
	for listen, want := range map[string]string{
		"0.0.0.0:0": "MEANDER_UI_TOKEN", ":4280": "MEANDER_UI_TOKEN", "rollouts.example.org:80": "MEANDER_UI_TOKEN",
		"127.0.0.1": "must be host:port", "127.0.0.1:0": "", "localhost:4280": "", "[::1]:0": "",
	} {
		err := ui.Config{Listen: listen}.Validate()
		if got := fmt.Sprint(err); (err == nil) != (want == "") || !strings.Contains(got, want) {
			t.Errorf("listen %q: %v, want %q", listen, err, want)
		}
		if want == "MEANDER_UI_TOKEN" {
			if err := (ui.Config{Listen: listen, Token: "x"}).Validate(); err != nil {
				t.Errorf("listen %q with a token: %v", listen, err)
			}
		}
	}
	s := servePage(t, func(c *ui.Config) { c.Token = "open sesame" })
	for _, c := range []struct {
		what string
		give func(*http.Request)
		want int
	}{
		{"nothing", func(*http.Request) {}, 401},
		{"another password", func(r *http.Request) { r.SetBasicAuth("anybody", "open") }, 401},
		{"a longer password", func(r *http.Request) { r.SetBasicAuth("anybody", "open sesame ") }, 401},
		{"the password", func(r *http.Request) { r.SetBasicAuth("anybody", "open sesame") }, 200},
		{"another token", func(r *http.Request) { r.Header.Set("Authorization", "Bearer open") }, 401},
		{"the token", func(r *http.Request) { r.Header.Set("Authorization", "Bearer open sesame") }, 200},
		{"it as a cookie", func(r *http.Request) { r.Header.Set("Cookie", s.cookie()+"=open sesame") }, 401},
	} {
		for _, path := range []string{"/", "/api/runs"} {
			status, header, _ := s.ask(t, "GET", path, c.give)
			if status != c.want || (status == 401) != (header.Get("WWW-Authenticate") == `Bearer realm="meander"`) {
				t.Errorf("%s with %s: %d, want %d", path, c.what, status, c.want)
			}
		}
	}
}

// cookie is the name of the cookie of a page.
func (s *served) cookie() string {
	return "meander-" + s.url[strings.LastIndex(s.url, ":")+1:len(s.url)-1]
}

// A link with the token, or the form that asks for it, gives a browser a cookie that scripts and other sites do not
// get; the token is in no address of the page.
func TestServe_SignIn(t *testing.T) {
	s := servePage(t, func(c *ui.Config) { c.Token = "open-sesame" })
	s.http.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	form := func(token string, more ...string) func(*http.Request) {
		return func(r *http.Request) {
			r.Body = io.NopCloser(strings.NewReader("token=" + token))
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			for i := 0; i < len(more); i += 2 {
				r.Header.Set(more[i], more[i+1])
			}
		}
	}
	for name, c := range map[string]struct {
		method, path string
		change       func(*http.Request)
		want         int
		says         string
	}{
		"nothing":           {"GET", "/", nil, 401, `id="wrong" hidden`},
		"a wrong link":      {"GET", "/?token=open", nil, 401, `id="wrong">`},
		"a link":            {"GET", "/?token=open-sesame", nil, 303, ""},
		"a link elsewhere":  {"GET", "/api/runs?token=open-sesame", nil, 401, "asks for a token"},
		"a wrong form":      {"POST", "/", form("open"), 401, `id="wrong">`},
		"a form":            {"POST", "/", form("open-sesame"), 303, ""},
		"a copied token":    {"POST", "/", form("+open-sesame%0A"), 303, ""},
		"of another site":   {"POST", "/", form("open-sesame", "Sec-Fetch-Site", "cross-site"), 403, "only the page itself"},
		"of another origin": {"POST", "/", form("open-sesame", "Origin", "http://evil.example"), 403, "only the page itself"},
		"a change":          {"POST", "/api/dead/1/drop", form("open-sesame"), 401, "asks for a token"},
		"its looks":         {"GET", "/style.css", nil, 200, "--accent"},
		"another host":      {"GET", "/?token=open-sesame", func(r *http.Request) { r.Host = "evil.example" }, 421, "not served as"},
	} {
		status, header, body := s.ask(t, c.method, c.path, c.change)
		if status != c.want || !strings.Contains(string(body), c.says) {
			t.Errorf("%s: %d, want %d: %s", name, status, c.want, body)
		}
		set := header.Get("Set-Cookie")
		if given := status == 303; given != (set != "") || given && header.Get("Location") != "/" ||
			strings.Contains(set, "sesame") {
			t.Errorf("%s: the cookie %q, to %q", name, set, header.Get("Location"))
		}
		if status != 303 {
			continue
		}
		for _, part := range []string{s.cookie() + "=", "HttpOnly", "SameSite=Lax", "Path=/"} {
			if !strings.Contains(set, part) {
				t.Errorf("%s: the cookie is %q, without %s", name, set, part)
			}
		}
		with := func(r *http.Request) { r.Header.Set("Cookie", strings.Split(set, ";")[0]) }
		if status, _, _ := s.ask(t, "GET", "/api/runs", with); status != 200 {
			t.Errorf("%s: with the cookie %d", name, status)
		}
		again := func(r *http.Request) { c.change(r); with(r) }
		if c.change == nil {
			again = with
		}
		if status, header, _ := s.ask(t, c.method, c.path, again); status != 303 || header.Get("Location") != "/" {
			t.Errorf("%s, of a browser that has signed in: %d to %q", name, status, header.Get("Location"))
		}
	}
}

// A page with Admin changes something only for itself: what a form or a script of another site sends is refused.
func TestServe_Admin(t *testing.T) {
	s := servePage(t, func(c *ui.Config) { c.Admin = true })
	m := &bus.Message{
		Subject: schemas.PromptSubject("r1"),
		Data:    bustest.Encode(t, &schemas.Prompt{UID: "p", Prompt: "x"}), Stream: schemas.StreamPrompts, Seq: 1,
	}
	if err := s.Bus.Dead(t.Context(), schemas.ServiceIntake, schemas.CodeInvalid, "why", m); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		headers map[string]string
		path    string
		want    int
	}{
		"another site":     {map[string]string{"Content-Type": "application/json", "Sec-Fetch-Site": "cross-site"}, "/api/dead/1/drop", 403},
		"another origin":   {map[string]string{"Content-Type": "application/json", "Origin": "http://evil.example"}, "/api/dead/1/drop", 403},
		"a form":           {map[string]string{"Content-Type": "text/plain"}, "/api/dead/1/drop", 403},
		"nothing there":    {map[string]string{"Content-Type": "application/json"}, "/api/dead/9/drop", 404},
		"no sample":        {map[string]string{"Content-Type": "application/json"}, "/api/runs/r1/groups/a/0/verdict", 404},
		"the list of runs": {map[string]string{"Content-Type": "application/json"}, "/api/runs", 405},
	} {
		status, _, body := s.ask(t, "POST", c.path, func(r *http.Request) {
			for k, v := range c.headers {
				r.Header.Set(k, v)
			}
		})
		if status != c.want {
			t.Errorf("%s: %d, want %d: %s", name, status, c.want, body)
		}
	}
	if got := bustest.Dead(t, s.Bus, 1); len(got) != 1 {
		t.Errorf("%d letters are left", len(got))
	}
	status, _, body := s.ask(t, "POST", "/api/dead/1/drop",
		func(r *http.Request) { r.Header.Set("Content-Type", "application/json") })
	if status != 200 {
		t.Errorf("drop: %d %s", status, body)
	}
}

// A person gives verdicts to the samples that wait for them: the first one counts, and closes the group.
func TestServe_Verdicts(t *testing.T) {
	s := servePage(t, func(c *ui.Config) {
		c.Admin, c.Doctor = true, func(context.Context) any { return []object{{"area": "disk", "state": "ok"}} }
	})
	s.startPipeline(t)
	s.publish(t, "r1", "a", "a fox", func(p *schemas.Prompt) {
		p.Reward, p.Deadline = []schemas.RewardSpec{{Name: "external"}}, new(time.Now().Add(time.Hour).UnixNano())
	})
	bustest.Await(t, s.Bus, 2, schemas.StreamTrajectories)
	var waiting []any
	bustest.Until(t, "two samples wait", func() error {
		if waiting = get[object](t, s, "runs/r1/verdicts")["waiting"].([]any); len(waiting) != 2 {
			return fmt.Errorf("%v", waiting)
		}
		return nil
	})
	// Browsers that do not send what they have announced keep nobody from reading.
	for range 20 {
		c, err := net.Dial("tcp", strings.TrimSuffix(strings.TrimPrefix(s.url, "http://"), "/"))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprint(c, "POST /api/runs/r1/groups/a/0/verdict HTTP/1.1\r\nHost: localhost\r\n"+
			"Content-Type: application/json\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n")
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(line, "100 Continue") {
			t.Fatalf("%q %v", line, err)
		}
	}
	name := waiting[0].(object)["name"]
	for _, c := range []struct {
		sample, body string
		want         int
	}{
		{"0", `{"name": "other", "value": 1}`, 400},
		{"0", fmt.Sprintf(`{"name": %q}`, name), 400},
		{"0", "x", 400},
		{"0", fmt.Sprintf(`{"name": %q, "value": 0.5}`, name), 200},
		{"0", fmt.Sprintf(`{"name": %q, "value": 0.5}`, name), 200},
		{"0", fmt.Sprintf(`{"name": %q, "value": 1}`, name), 409},
		{"1", fmt.Sprintf(`{"name": %q, "value": 1}`, name), 200},
	} {
		status, _, body := s.ask(t, "POST", "/api/runs/r1/groups/a/"+c.sample+"/verdict", func(r *http.Request) {
			r.Header.Set("Content-Type", "application/json")
			r.Body = io.NopCloser(strings.NewReader(c.body))
		})
		if status != c.want {
			t.Errorf("%s for sample %s: %d, want %d: %s", c.body, c.sample, status, c.want, body)
		}
	}
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	bustest.Until(t, "the result on the page", func() error {
		if got := get[object](t, s, "runs/r1/groups/a"); got["mean"] != 0.75 {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	if got := get[object](t, s, "page"); got["admin"] != true || got["doctor"] != true {
		t.Errorf("the page may %v", got)
	}
	if got := fmt.Sprint(get[object](t, s, "doctor")); !strings.Contains(got, "disk") {
		t.Errorf("findings %s", got)
	}
}

// A group that has its result takes no more verdicts.
func TestServe_VerdictTooLate(t *testing.T) {
	s := servePage(t, func(c *ui.Config) { c.Admin = true })
	s.startPipeline(t)
	s.publish(t, "r1", "b", "a fox", func(p *schemas.Prompt) {
		p.Reward, p.Deadline = []schemas.RewardSpec{{Name: "external"}}, new(time.Now().Add(time.Hour).UnixNano())
	})
	bustest.Await(t, s.Bus, 2, schemas.StreamTrajectories)
	if _, err := client.New(s.Bus).Control(t.Context(), &schemas.Control{
		Run: "r1", UID: "b", Action: schemas.ControlCancel,
	}); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	if status, _, body := s.ask(t, "POST", "/api/runs/r1/groups/b/0/verdict", func(r *http.Request) {
		r.Header.Set("Content-Type", "application/json")
		r.Body = io.NopCloser(strings.NewReader(fmt.Sprintf(`{"name": %q, "value": 1}`, "external")))
	}); status != 409 || !strings.Contains(string(body), "the group has its result, cancelled") {
		t.Errorf("a verdict of a closed group: %d %s", status, body)
	}
}

// A person judges a text by its whole conversation.
func TestServe_VerdictsOfTexts(t *testing.T) {
	s := servePage(t, nil)
	s.serveModel(t, models+"sums")
	s.publish(t, "r1", "a", "347+58=?", func(p *schemas.Prompt) {
		p.Model, p.ImageSettings = "sums", schemas.ImageSettings{}
		p.Reward, p.Deadline = []schemas.RewardSpec{{Name: "external"}}, new(time.Now().Add(time.Hour).UnixNano())
	})
	bustest.Until(t, "two samples wait", func() error {
		waiting := get[object](t, s, "runs/r1/verdicts")["waiting"].([]any)
		if len(waiting) != 2 {
			return fmt.Errorf("%v", waiting)
		}
		text := waiting[0].(object)["text"].(object)
		if turns := text["turns"].([]any); len(turns) < 2 || text["ids"] != nil ||
			!strings.Contains(fmt.Sprint(text["messages"]), "347+58=?") {
			t.Errorf("judged is %v", text)
		}
		return nil
	})
}
