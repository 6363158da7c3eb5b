package ui_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	stdimage "image"
	"image/draw"
	"image/png"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/ui"
)

// change posts what a person does on the page, and returns the status and what was answered.
func (s *served) change(t *testing.T, path string, what any) (int, string) {
	t.Helper()
	status, _, body := s.ask(t, "POST", "/api/"+path, func(r *http.Request) {
		r.Header.Set("Content-Type", "application/json")
		data, err := json.Marshal(what)
		if err != nil {
			t.Fatal(err)
		}
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(string(data))), int64(len(data))
	})
	return status, string(body)
}

// markup is what a stranger may write: it must stay text.
const markup = `<img src=x onerror="window.seen.errors.push('run')"><script>window.seen.errors.push('run')</script>`

// serveRuns serves a page of three runs with rewards: fox, hen and owl; the mean rewards fall in that order.
func serveRuns(t *testing.T, change func(*ui.Config)) *served {
	t.Helper()
	s := servePage(t, func(c *ui.Config) {
		c.Admin = true
		if change != nil {
			change(c)
		}
	})
	s.startPipeline(t)
	for i, run := range []schemas.Run{"fox", "hen", "owl"} {
		s.publish(t, run, "a", "a "+string(run), func(p *schemas.Prompt) {
			p.Reward = []schemas.RewardSpec{{Name: "jpeg_compressibility", Weight: new(float64(i + 1))}}
			p.Rollout.NoiseLevel, p.Seed = new(0.5+0.1*float64(i)), new(int64(7))
		})
	}
	bustest.Await(t, s.Bus, 3, schemas.StreamAdvantages)
	return s
}

// names are the runs of a list, in its order.
func names(t *testing.T, s *served, query string) string {
	t.Helper()
	var list []string
	for _, r := range get[object](t, s, "runs"+query)["runs"].([]any) {
		list = append(list, r.(map[string]any)["run"].(string))
	}
	return strings.Join(list, " ")
}

// The list says model and mean of each run, sorts and searches, and has what people say of runs; a run goes by its
// name.
func TestRuns_List(t *testing.T) {
	s := serveRuns(t, nil)
	first := get[object](t, s, "runs?text=fox")["runs"].([]any)[0].(map[string]any)
	group := get[object](t, s, "runs/fox/groups/a")
	if first["mean_reward"] != group["mean"] || first["model"] != group["lane"] {
		t.Errorf("the list says %v of %v; the group %v of %v", first["mean_reward"], first["model"], group["mean"],
			group["lane"])
	}
	if status, said := s.change(t, "runs/hen/notes", object{"tags": []string{"b 2", markup[:20], "b 2"}, "note": markup}); status != 200 || !strings.Contains(said, `"b 2"`) {
		t.Fatalf("%d %s", status, said)
	}
	for query, want := range map[string]string{
		"?order=mean": "owl hen fox", "?order=-mean": "fox hen owl", "?order=run": "fox hen owl", "?order=-run&limit=1&offset=1": "hen",
		"?text=ONERROR": "hen", "?tag=b+2": "hen", "?text=owl": "owl", "?name=owl": "owl", "?name=ow": "", "?state=open": "", "?model=synthetic&order=run": "fox hen owl",
	} {
		bustest.Until(t, query, func() error { // the list is shared for a moment
			if got := names(t, s, query); got != want {
				return fmt.Errorf("%q, want %q", got, want)
			}
			return nil
		})
	}
	for what, want := range map[string]struct {
		path string
		body any
		says string
	}{
		"a long tag":     {"runs/fox/notes", object{"tags": []string{strings.Repeat("x", 41)}}, "1 to 40 characters"},
		"many tags":      {"runs/fox/notes", object{"tags": strings.Split(strings.Repeat("x,", 17), ",")}, "at most 16"},
		"an unknown":     {"runs/fox/notes", object{"tag": "x"}, "must be tags and a note"},
		"a control":      {"runs/fox/notes", object{"note": "\x1b[2J"}, "can be seen"},
		"no such run":    {"runs/none/notes", object{"tags": []string{}}, "not stored"},
		"another name":   {"runs/fox/remove", object{"name": "hen"}, "must be fox"},
		"none to remove": {"runs/none/remove", object{"name": "none"}, "not stored"},
	} {
		if status, said := s.change(t, want.path, want.body); status < 400 || !strings.Contains(said, want.says) {
			t.Errorf("%s: %d %s", what, status, said)
		}
	}
	if status, _, body := s.ask(t, "GET", "/api/runs?order=size", nil); status != 400 ||
		!strings.Contains(string(body), "must be one of [bytes") {
		t.Errorf("an order that is none: %d %s", status, body)
	}
	if status, said := s.change(t, "runs/hen/remove", object{"name": "hen"}); status != 200 ||
		!strings.Contains(said, "events") {
		t.Fatalf("%d %s", status, said)
	}
	bustest.Until(t, "hen is gone", func() error {
		if got := names(t, s, "?order=run"); got != "fox owl" {
			return fmt.Errorf("%s", got)
		}
		return nil
	})
	if notes, err := s.Bus.Notes(t.Context(), "*"); err != nil || len(notes) != 0 {
		t.Errorf("the notes of a removed run: %v, %v", notes, err)
	}
}

// The comparison names the settings in which runs differ, and those alone.
func TestRuns_Differences(t *testing.T) {
	s := serveRuns(t, nil)
	got := map[string]string{}
	for _, d := range get[object](t, s, "compare?a=fox&b=owl")["settings"].([]any) {
		x := d.(map[string]any)
		got[x["name"].(string)] = fmt.Sprint(x["a"], " | ", x["b"])
	}
	want := map[string]string{"noise_level": "0.5 | 0.7", "reward": "jpeg_compressibility | 3 × jpeg_compressibility"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// People find, sort, tag and delete runs on the page; what strangers write stays text.
func TestPage_Runs(t *testing.T) {
	chromium(t)
	s := serveRuns(t, nil)
	p := startBrowser(t).open(t, s.url)
	p.to("#/runs?order=mean")
	shown := func(want string) {
		t.Helper()
		p.until(`[...document.querySelectorAll("a.row")].map((a) => a.textContent).join(" ") === ` + quoted(want))
	}
	shown("owl hen fox")
	p.click(`[data-order=mean]`)
	shown("fox hen owl")
	p.until(`location.hash === "#/runs?order=-mean" && document.activeElement.dataset.order === "mean" && document.querySelector("[aria-sort=descending]")`)
	p.click(".menu summary")
	p.click(`.menu label:last-of-type input`)
	p.until(`!document.querySelector("[data-order=newest]") && localStorage.getItem("meander.hidden").includes("newest")`)
	p.click(".menu summary")
	p.follow("#/runs/hen")
	p.press("Escape")
	press := func(button string) { // a chart that comes later moves what is below it
		t.Helper()
		eval[any](p, `[...document.querySelectorAll("button")].find((b) => b.textContent === `+quoted(button)+`).click()`)
	}
	press("Edit")
	eval[any](p, fmt.Sprintf(`document.getElementById("runtags").value = "night, %s"; document.getElementById("runnote").value = %s`, "<b>x", quoted(markup)))
	press("Save")
	p.until(`document.querySelector(".tags") && document.querySelector(".promptbox").textContent === ` + quoted(markup))
	p.to("#/runs?tag=night")
	shown("hen")
	p.to("#/runs/owl")
	press("Delete run")
	eval[any](p, `document.getElementById("runname").focus()`)
	p.press("ow")
	p.until(`document.querySelector("form button.bad").disabled`)
	p.press("l")
	press("Delete it for ever")
	p.shows("events removed.")
	p.to("#/runs?order=run")
	shown("fox hen")
	if file := os.Getenv("MEANDER_UI_AXE"); file != "" {
		p.everywhere(axe(t), "runs-list", "#/runs?order=run")
		p.everywhere(axe(t), "runs-notes", "#/runs/hen")
		p.everywhere(axe(t), "runs-compare", "#/compare?a=fox&b=hen")
	}
}

// everywhere looks at a page at three sizes, dark and light: nothing scrolls sideways, and axe finds nothing.
func (p *tab) everywhere(checker, name, hash string) {
	p.Helper()
	for _, width := range []int{390, 1440, 2560} {
		for _, dark := range []bool{false, true} {
			p.size(width, 900)
			p.dark(dark)
			p.to(hash)
			for i := range eval[int](p, `document.querySelectorAll("main details").length`) {
				eval[any](p, fmt.Sprintf(`document.querySelectorAll("main details")[%d].open = true`, i))
			}
			if over := eval[int](p, "document.documentElement.scrollWidth - innerWidth"); over > 0 {
				p.Errorf("%s at %d px scrolls sideways by %d", name, width, over)
			}
			p.save(fmt.Sprintf("%s-%d-%s", name, width, map[bool]string{true: "dark", false: "light"}[dark]))
			p.accessible(checker, fmt.Sprintf("%s at %d px, dark %v", name, width, dark))
		}
	}
}

// decoded are the size and the pixels of a PNG.
func decoded(t *testing.T, data []byte) string {
	t.Helper()
	img, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	pixels := stdimage.NewNRGBA(img.Bounds())
	draw.Draw(pixels, pixels.Rect, img, img.Bounds().Min, draw.Src)
	return fmt.Sprint(pixels.Rect, pixels.Pix)
}

// A sampler of the lane says what its network takes each stored state for: after the last step the image itself.
// Without one the page says why; what was asked for before is kept.
func TestServe_Seen(t *testing.T) {
	s := servePage(t, nil)
	pipeline := s.startPipeline(t)
	s.publish(t, "r1", "a", "a fox", func(p *schemas.Prompt) { p.Rollout = schemas.Rollout{} })
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	image := func(kind string) (int, []byte) {
		status, _, body := s.ask(t, "GET", "/media/r1/a/0/"+kind, nil)
		return status, body
	}
	_, made := image("image")
	_, first := image("seen-0")
	status, last := image("seen-3")
	if status != 200 || decoded(t, last) != decoded(t, made) || decoded(t, first) == decoded(t, made) {
		t.Errorf("%d: the last state is not taken for the image, or the first one is", status)
	}
	for kind, says := range map[string]string{"seen-9": "not stored", "seen--1": "not stored", "seen-x": "not stored"} {
		if status, body := image(kind); status != 404 || !strings.Contains(string(body), says) {
			t.Errorf("%s: %d %s", kind, status, body)
		}
	}
	for question, says := range map[string]string{
		"{": "cannot be read", `{"run": "../x", "uid": "a"}`: "run", `{"run": "r1", "uid": "a", "step": 2000000}`: "must be indices",
		`{"run": "r1", "uid": "z"}`: "the sample", `{"run": "r1", "uid": "a", "step": 9}`: "not stored",
	} {
		m, err := s.Bus.Conn().Request(schemas.SeenSubject("synthetic"), []byte(question), time.Minute)
		if err != nil || !strings.Contains(m.Header.Get(schemas.HeaderSeenError), says) {
			t.Errorf("%s: %v, %v", question, m, err)
		}
	}
	pipeline.Stop()
	if status, kept := image("seen-0"); status != 200 || !bytes.Equal(kept, first) {
		t.Errorf("what was asked for is not kept: %d", status)
	}
	if status, body := image("seen-1"); status != 404 ||
		!strings.Contains(string(body), "no sampler serves the lane synthetic now") {
		t.Errorf("%d %s", status, body)
	}
}
