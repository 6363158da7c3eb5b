package ui_test

import (
	"bufio"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// chromium returns the browser of this machine, or skips the test. CHROMIUM names another one.
func chromium(t *testing.T) string {
	t.Helper()
	for _, name := range []string{os.Getenv("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "chrome"} {
		if path, err := exec.LookPath(name); name != "" && err == nil {
			return path
		}
	}
	t.Skip("needs chromium or google-chrome in PATH, or the path of one in CHROMIUM")
	return ""
}

// browser is a headless Chromium, spoken to in the DevTools protocol: JSON, ended by zero bytes, over two pipes.
type browser struct {
	mu      sync.Mutex
	in      *os.File
	id      int
	answers map[int]chan reply
	gone    chan struct{}
}

// reply is a message of the browser: the answer to a command, or an event.
type reply struct {
	ID     int             `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *struct {
		Message string `json:"message"`
	} `json:"error"`
}

// startBrowser starts a browser, which ends with the test.
func startBrowser(t *testing.T) *browser {
	t.Helper()
	toBrowser, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, fromBrowser, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	// The sandbox of Chromium needs rights that containers lack; what is shown is our own page.
	//nolint:usetesting // Chromium's helpers still write while the test ends
	data, err := os.MkdirTemp("", "meander-ui-")
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(chromium(t), "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
		"--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--force-color-profile=srgb",
		"--user-data-dir="+data, "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "about:blank")
	c.ExtraFiles = []*os.File{toBrowser, fromBrowser}
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.Start(); err != nil {
		t.Fatalf("start the browser: %v", err)
	}
	toBrowser.Close()
	fromBrowser.Close()
	b := &browser{in: in, answers: map[int]chan reply{}, gone: make(chan struct{})}
	go b.read(out)
	t.Cleanup(func() {
		_ = b.send(0, "", "Browser.close", nil)
		select {
		case <-b.gone:
		case <-time.After(10 * time.Second):
		}
		_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // those of its processes that are left
		in.Close()
		out.Close()
		<-b.gone
		_ = c.Wait() // a kill is no clean end for it
		for i := 0; os.RemoveAll(data) != nil && i < 50; i++ {
			time.Sleep(100 * time.Millisecond) // a process that ends writes to it still
		}
	})
	if err := b.call("", "Browser.getVersion", nil, nil); err != nil && os.Getenv("MEANDER_UI_AXE") == "" {
		t.Skipf("the browser does not start here: %v", err)
	}
	return b
}

// read gives answers to those who wait for them, until the browser is gone.
func (b *browser) read(out *os.File) {
	defer close(b.gone)
	in := bufio.NewReaderSize(out, 1<<20)
	for {
		data, err := in.ReadBytes(0)
		if err != nil {
			return
		}
		var r reply
		if json.Unmarshal(data[:len(data)-1], &r) != nil || r.ID == 0 {
			continue // an event
		}
		b.mu.Lock()
		c := b.answers[r.ID]
		delete(b.answers, r.ID)
		b.mu.Unlock()
		if c != nil {
			c <- r
		}
	}
}

// call gives a command to the browser, or to a tab of it, and decodes its answer into result.
func (b *browser) call(session, method string, params, result any) error {
	c := make(chan reply, 1)
	b.mu.Lock()
	b.id++
	b.answers[b.id] = c
	err := b.send(b.id, session, method, params)
	b.mu.Unlock()
	if err != nil {
		return err
	}
	select {
	case r := <-c:
		if r.Error != nil {
			return fmt.Errorf("%s: %s", method, r.Error.Message)
		}
		if result == nil {
			return nil
		}
		return json.Unmarshal(r.Result, result)
	case <-b.gone:
		return errors.New("the browser has ended")
	case <-time.After(2 * time.Minute):
		return fmt.Errorf("%s: no answer in two minutes", method)
	}
}

// send writes a command to the browser, whose answer has the number id.
func (b *browser) send(id int, session, method string, params any) error {
	message := object{"id": id, "method": method}
	if params != nil {
		message["params"] = params
	}
	if session != "" {
		message["sessionId"] = session
	}
	data, err := json.Marshal(message)
	if err == nil {
		_, err = b.in.Write(append(data, 0))
	}
	return err
}

// tab is one tab of a browser.
type tab struct {
	*testing.T
	b       *browser
	session string
	target  string
	base    string
}

// watcher counts, in the page, tasks that block it and errors, from before its first script on.
const watcher = `window.seen = { tasks: [], errors: [] };
new PerformanceObserver((l) => l.getEntries().forEach((e) => window.seen.tasks.push(Math.round(e.duration)))).observe({ type: "longtask" });
addEventListener("error", (e) => window.seen.errors.push(e.message));
addEventListener("unhandledrejection", (e) => window.seen.errors.push(String(e.reason)));
addEventListener("securitypolicyviolation", (e) => window.seen.errors.push("policy: " + e.violatedDirective + " " + e.blockedURI));`

// open opens a tab on the page at base; it closes with the test, which fails if the page had errors.
func (b *browser) open(t *testing.T, base string) *tab {
	t.Helper()
	p := &tab{T: t, b: b, base: strings.TrimSuffix(base, "/")}
	var made struct{ TargetID, SessionID string }
	if err := b.call("", "Target.createTarget", object{"url": "about:blank"}, &made); err != nil {
		t.Fatal(err)
	}
	p.target = made.TargetID
	if err := b.call("", "Target.attachToTarget", object{"targetId": p.target, "flatten": true}, &made); err != nil {
		t.Fatal(err)
	}
	p.session = made.SessionID
	p.do("Page.enable", nil)
	p.do("Page.addScriptToEvaluateOnNewDocument", object{"source": watcher})
	p.size(1440, 900)
	url := p.base + "/"
	if strings.HasSuffix(p.base, ".html") { // a file
		url = p.base
	}
	p.do("Page.navigate", object{"url": url})
	p.until(`document.readyState === "complete" && window.seen`)
	t.Cleanup(func() {
		if faults := eval[[]string](p, "window.seen.errors"); len(faults) > 0 {
			t.Errorf("the page has errors: %q", faults)
		}
		p.do("Target.closeTarget", object{"targetId": p.target})
	})
	return p
}

// do gives the tab a command.
func (p *tab) do(method string, params any) {
	p.Helper()
	if err := p.b.call(p.session, method, params, nil); err != nil {
		p.Fatal(err)
	}
}

// eval returns the value of an expression in the page.
func eval[T any](p *tab, expression string) T {
	p.Helper()
	v, err := evaluate[T](p, expression)
	if err != nil {
		p.Fatalf("%s: %v", expression, err)
	}
	return v
}

// evaluate is eval of a page that may be on its way to another one, which is an error.
func evaluate[T any](p *tab, expression string) (v T, err error) {
	var got struct {
		Result struct {
			Value json.RawMessage
		}
		ExceptionDetails *struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	params := object{"expression": expression, "returnByValue": true, "awaitPromise": true}
	if err := p.b.call(p.session, "Runtime.evaluate", params, &got); err != nil {
		return v, err
	}
	if e := got.ExceptionDetails; e != nil {
		return v, fmt.Errorf("%s %s", e.Text, e.Exception.Description)
	}
	if len(got.Result.Value) > 0 {
		err = json.Unmarshal(got.Result.Value, &v)
	}
	return v, err
}

// until waits until an expression is true in the page.
func (p *tab) until(expression string) {
	p.Helper()
	bustest.Until(p.T, expression, func() error {
		is, err := evaluate[bool](p, "!!("+expression+")")
		if err == nil && !is {
			var text string
			text, err = evaluate[string](p, `location.hash + " " + (document.getElementById("main") || document.body).innerText.slice(0, 600)`)
			err = cmp.Or(err, errors.New(text))
		}
		return err
	})
}

// shows waits until the page has a text.
func (p *tab) shows(texts ...string) {
	p.Helper()
	for _, text := range texts {
		p.until(fmt.Sprintf("document.body.innerText.includes(%s)", quoted(text)))
	}
}

// to goes to an address of the page, and waits until it is shown.
func (p *tab) to(hash string) {
	p.Helper()
	eval[any](p, `location.hash = `+quoted(hash))
	p.awaitShown()
}

// awaitShown waits until the page shows what it was asked for, with its images.
func (p *tab) awaitShown() {
	p.Helper()
	p.until(`!document.querySelector(".skeleton") && document.getElementById("main").dataset.shown === location.hash`)
	p.until(`[...document.images].every((i) => i.complete || i.loading === "lazy" && i.getBoundingClientRect().top > innerHeight)`)
}

// quoted returns a text for JavaScript.
func quoted(text string) string {
	data, _ := json.Marshal(text) // texts always encode
	return string(data)
}

// size sets the size of the window in CSS pixels.
func (p *tab) size(width, height int) {
	p.Helper()
	p.do("Emulation.setDeviceMetricsOverride", object{
		"width": width, "height": height, "deviceScaleFactor": 1,
		"mobile": width < 600,
	})
}

// dark sets whether the system's colours are dark.
func (p *tab) dark(dark bool) {
	p.Helper()
	value := map[bool]string{true: "dark", false: "light"}[dark]
	p.do("Emulation.setEmulatedMedia", object{"features": []object{{"name": "prefers-color-scheme", "value": value}}})
}

// click clicks in the middle of the first element that a selector finds, as a mouse does.
func (p *tab) click(selector string) {
	p.Helper()
	p.until("document.querySelector(" + quoted(selector) + ")")
	at := eval[[]float64](p, `(() => { const e = document.querySelector(`+quoted(selector)+`); e.scrollIntoView({ block: "center" });
		const r = e.getClientRects()[0]; return [r.x + r.width / 2, r.y + r.height / 2]; })()`)
	for _, kind := range []string{"mouseMoved", "mousePressed", "mouseReleased"} {
		p.do("Input.dispatchMouseEvent", object{
			"type": kind, "x": at[0], "y": at[1], "button": "left",
			"clickCount": 1,
		})
	}
}

// follow clicks a link until the page is at its address: what stands above it may move it while it is clicked.
func (p *tab) follow(hash string) {
	p.Helper()
	bustest.Until(p.T, "a click that leads to "+hash, func() error {
		if at := eval[string](p, "location.hash"); at != hash {
			p.click(`a[href=` + quoted(hash) + `]`)
			return errors.New("the page is at " + at)
		}
		return nil
	})
	p.awaitShown()
}

// keys are the keys that have no character.
var keys = map[string]object{
	"Enter": {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"},
	"Tab":   {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}, "Escape": {"key": "Escape", "code": "Escape", "windowsVirtualKeyCode": 27},
	"ArrowRight": {"key": "ArrowRight", "code": "ArrowRight", "windowsVirtualKeyCode": 39},
}

// press presses keys one after the other: names of keys, or texts whose characters are typed.
func (p *tab) press(names ...string) {
	p.Helper()
	for _, name := range names {
		strokes := []object{keys[name]}
		if keys[name] == nil {
			strokes = nil
			for _, c := range name {
				strokes = append(strokes, object{"key": string(c), "text": string(c)})
			}
		}
		for _, s := range strokes {
			for _, kind := range []string{"keyDown", "keyUp"} {
				event := object{"type": kind}
				for k, v := range s {
					event[k] = v
				}
				p.do("Input.dispatchKeyEvent", event)
			}
		}
	}
}

// shot returns an image of the page: of the window, or with whole of all of it.
func (p *tab) shot(whole bool) []byte {
	p.Helper()
	var got struct{ Data string }
	params := object{"format": "png", "captureBeyondViewport": whole}
	if whole {
		s := eval[[]int](p, "[document.documentElement.clientWidth, Math.min(6000, "+
			"document.documentElement.scrollHeight)]")
		params["clip"] = object{"x": 0, "y": 0, "width": s[0], "height": s[1], "scale": 1}
	}
	if err := p.b.call(p.session, "Page.captureScreenshot", params, &got); err != nil {
		p.Fatal(err)
	}
	data, err := base64.StdEncoding.DecodeString(got.Data)
	if err != nil {
		p.Fatal(err)
	}
	return data
}
