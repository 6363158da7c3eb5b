package ui_test

import (
	"bytes"
	"errors"
	"fmt"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/ui"
)

// Tests of the page in a browser. The first one runs wherever there is one; the others are 'make ui-test'.

// A reader follows links from the list of runs to a sample, and sees a group come that is published meanwhile.
func TestPage(t *testing.T) {
	chromium(t)
	s := servePage(t, nil)
	s.startPipeline(t)
	s.publish(t, "r1", "a", "a fox", nil)
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	p := startBrowser(t).open(t, s.url)
	for _, hash := range []string{"#/runs/r1", "#/runs/r1/a", "#/runs/r1/a/1"} {
		p.follow(hash)
	}
	p.shows("Sample 1", "Sigma and noise by step", "Denoising")
	p.to("#/system")
	p.shows("version 0", " places, ", "at work")
	p.follow("#/system/synthetic")
	p.shows("1 version of the weights, the newest first")
	p.to("#/runs/r1")
	s.publish(t, "r1", "b", "a hen", nil)
	p.until(`[...document.querySelectorAll("tbody tr")].some((r) => r.innerText.includes("a hen") && r.innerText.includes("complete"))`)
	// A press that is no click, or whose end the page never sees, holds nothing back for long.
	eval[any](p, `document.body.dispatchEvent(new PointerEvent("pointerdown", { bubbles: true, isPrimary: true, button: 2 }))`)
	eval[any](p, `document.body.dispatchEvent(new PointerEvent("pointerdown", { bubbles: true, isPrimary: true, button: 0 }))`)
	s.publish(t, "r1", "c", "an owl", nil)
	p.shows("an owl")
	// Back finds a page as it was left, and a new one begins at its top. Each says whether its figures are fresh.
	p.size(500, 300)
	eval[any](p, `scrollTo(0, 150)`)
	p.until(`scrollY === 150`)
	p.to("#/runs/r1/a/1")
	p.until(`scrollY === 0`)
	p.until(`document.getElementById("linksays").textContent === "connected"`)
	eval[any](p, `history.back()`)
	p.until(`document.getElementById("main").dataset.shown === "#/runs/r1" && scrollY === 150`)
}

// A view that is opened while the server of the pipeline is away shows what is there once it comes.
func TestPage_OpenedWhileAway(t *testing.T) {
	chromium(t)
	s := servePage(t, nil, bustest.TCP)
	pipeline := s.startPipeline(t)
	s.publish(t, "r1", "a", "a fox", nil)
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	pipeline.Stop()
	p := startBrowser(t).open(t, s.url)
	s.Options.Listen = strings.TrimPrefix(s.Server.ClientURL(), "nats://")
	if err := s.Server.Close(); err != nil {
		t.Fatal(err)
	}
	p.to("#/runs/r1/a")
	p.shows("Lost the server", "Try again")
	s.Start(t)
	p.shows("2 samples, best reward first", "connected")
}

// What a person looks at stays when samples come before it in the list: the verdict goes to what is shown.
func TestPage_Judge(t *testing.T) {
	chromium(t)
	s := servePage(t, func(c *ui.Config) { c.Admin = true })
	s.startPipeline(t)
	judged := func(p *schemas.Prompt) {
		p.Reward, p.Deadline = []schemas.RewardSpec{{Name: "external"}}, new(time.Now().Add(time.Hour).UnixNano())
	}
	s.publish(t, "r1", "a", "a fox", judged)
	bustest.Await(t, s.Bus, 2, schemas.StreamTrajectories)
	p := startBrowser(t).open(t, s.url)
	bustest.Until(t, "two samples wait", func() error {
		if n := len(get[object](t, s, "runs/r1/verdicts")["waiting"].([]any)); n != 2 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	// Sample 0 comes late to the page.
	eval[any](p, `(() => { const real = window.fetch; window.late = true; window.fetch = async (path, ...rest) => {
		const answer = await real(path, ...rest);
		if (!path.endsWith("/verdicts")) return answer;
		const x = await answer.json();
		if (window.late) x.waiting = x.waiting.filter((w) => w.uid !== "a" || w.sample_index !== 0);
		return new Response(JSON.stringify(x));
	}; })()`)
	p.to("#/judge/r1")
	p.until(`document.querySelector(".shot a").hash === "#/runs/r1/a/1"`)
	p.press("4")
	eval[any](p, `window.late = false`)
	s.publish(t, "r1", "b", "a hen", judged)
	p.until(`document.querySelector("#main .head").innerText.includes("4 ")`)
	p.press("Enter")
	p.until(`document.querySelector(".shot a").hash === "#/runs/r1/a/0"`)
	m := bustest.Await(t, s.Bus, 1, schemas.StreamVerdicts)
	for _, x := range m {
		if v := bustest.Decode[schemas.Verdict](t, x); v.UID != "a" || v.SampleIndex != 1 || *v.Value != 0.75 {
			t.Errorf("the verdict %v of sample %d of %s", *v.Value, v.SampleIndex, v.UID)
		}
	}
}

// axe is where make ui-test has put the checker of accessibility; without it the test is skipped.
func axe(t *testing.T) string {
	t.Helper()
	file := os.Getenv("MEANDER_UI_AXE")
	if file == "" {
		t.Skip("make ui-test runs it: it takes a minute, and needs npm")
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	chromium(t)
	return string(data)
}

// places are the pages of the world, with what each must show.
var places = []struct {
	name, hash string
	shows      []string
}{
	{"runs", "#/runs", []string{"signs", "judged", "scheduled"}},
	{"run", "#/runs/signs", []string{"Reward over time", "By data source", "numbers", "words", "groups closed"}},
	{"group", "#/runs/signs/p04", []string{"12 samples, best reward first", "glyph", "flow_grpo"}},
	{"sample", "#/runs/signs/p04/3", []string{"Denoising", "Sigma and noise by step", "Log-prob by step", "Noise level", "Time of a step", "denoised", "waited for its group"}},
	{"tree", "#/runs/tree/t", []string{"from the step where it leaves its parent"}},
	{"stages", "#/runs/stages/tree", []string{"4 samples, best reward first", "stands for the sample", "not trained", "2 samples"}},
	{"rounds", "#/runs/stages/rounds", []string{"the number is too low", "ends the sample", "score 0.250", "judge-2"}},
	{"stage", "#/runs/stages/rounds/1.judge", []string{"Stage judge of sample 1", "condition image", "Conversation", "critic · score 0.250", "answered"}},
	{"shared", "#/runs/stages/tree/2.think", []string{"Stage think of samples 2 to 3", "Tokens"}},
	{"scheduled", "#/runs/scheduled/s/0", []string{"Part that ran"}},
	{"texts", "#/runs/sums/q1", []string{"numeric_match", "4 samples"}},
	{"text", "#/runs/sums/q2/1", []string{"Conversation", "Tokens", "log-probs before temperature"}},
	{"compare", "#/compare?a=signs&b=again", []string{"mean reward of these prompts", "10 of 10 prompts that both runs have"}},
	{"judge", "#/judge/judged", []string{"3 samples wait", "waits for the verdict taste"}},
	{"system", "#/system", []string{"MDR_STEPS", "version 1", "cpu/", " places, "}},
	{"lane", "#/system/signs", []string{"the first adapter", "2 versions"}},
	{"dead", "#/dead", []string{"must be a multiple of"}},
	{"letter", "#/dead/1", []string{"Replay: publish it again", "Correct the prompt, and publish it again with another uid", "height"}},
	{"doctor", "#/doctor", []string{"MDR_STEPS is full", "1 fault"}},
	{"lost", "#/runs/none", []string{"this is not stored"}},
	{"nowhere", "#/nowhere", []string{"There is nothing at this address"}},
}

// Every kind of run is shown, from 360 to 2560 px without scrolling sideways, in light and dark, and without
// findings of axe. People judge, replay and compare; keys alone are enough for all of it.
func TestPage_World(t *testing.T) {
	checker := axe(t)
	s := startWorld(t)
	b := startBrowser(t)
	p := b.open(t, s.url)
	for _, place := range places {
		p.size(1440, 900)
		p.to(place.hash)
		p.shows(place.shows...)
		for _, width := range []int{360, 768, 1440, 2560} {
			for _, dark := range []bool{false, true} {
				p.size(width, 900)
				p.dark(dark)
				p.awaitShown()
				if over := eval[int](p, "document.documentElement.scrollWidth - innerWidth"); over > 0 {
					t.Errorf("%s at %d px scrolls sideways by %d", place.name, width, over)
				}
				p.save(fmt.Sprintf("%s-%d-%s", place.name, width, map[bool]string{true: "dark", false: "light"}[dark]))
				if width == 360 || width == 1440 {
					p.accessible(checker, fmt.Sprintf("%s at %d px, dark %v", place.name, width, dark))
				}
			}
		}
	}
	p.size(1440, 900)
	p.dark(false)
	p.guide(t)
	p.hover()
	p.judge(s)
	p.navigate()
	p.replay(s)
}

// save writes an image of the page to the folder MEANDER_UI_SHOTS, if there is one.
func (p *tab) save(name string) {
	p.Helper()
	if dir := os.Getenv("MEANDER_UI_SHOTS"); dir != "" {
		if err := os.WriteFile(filepath.Join(dir, name+".png"), p.shot(true), 0o644); err != nil {
			p.Fatal(err)
		}
	}
}

// accessible fails on findings of axe.
func (p *tab) accessible(checker, where string) {
	p.Helper()
	p.until("document.getAnimations().every((a) => a.playState !== 'running')") // colours on their way have no contrast
	if !eval[bool](p, "!!window.axe") {
		eval[any](p, checker+"\n;undefined")
	}
	found := eval[[]struct{ ID, Impact, Help, Where string }](p, `axe.run(document, { resultTypes: ["violations"] }).then((r) => r.violations.map((v) =>
		({ id: v.id, impact: v.impact, help: v.help, where: v.nodes.slice(0, 3).map((n) => n.html.slice(0, 160) + " " + (n.any[0] || {}).message).join(" | ") })))`)
	for _, f := range found {
		p.Errorf("%s: %s %s: %s: %s", where, f.Impact, f.ID, f.Help, f.Where)
	}
}

// hover points at a generated token: the likeliest tokens are listed, with the drawn one.
func (p *tab) hover() {
	p.Helper()
	p.to("#/runs/sums/q2/1")
	p.click(".tokens .tok[tabindex]")
	p.until(`document.querySelectorAll("ol.likely li").length === 8 && document.querySelector("ol.likely .drawn")`)
	sum := eval[float64](p, `[...document.querySelectorAll("ol.likely .num")].reduce((s, e) => s + Number(e.textContent), 0)`)
	if sum < 0.9 || sum > 1.001 {
		p.Errorf("the likeliest tokens have %v of the probability", sum)
	}
	p.save("text-hover")
}

// judge gives verdicts by keys alone.
func (p *tab) judge(s *served) {
	p.Helper()
	p.to("#/runs/judged")
	p.click(`a[href="#/judge/judged"]`)
	p.shows("3 samples wait.")
	p.press("4")
	p.until(`document.activeElement.textContent === "Give 0.75"`)
	p.press("Enter")
	p.shows("0.75 given to sample 0 of v.", "2 samples wait.")
	p.press("s")
	p.shows("Sample 1 of v is left for later.")
	p.press("1", "Enter")
	p.shows("0 given to sample 2 of v.", "1 sample waits.")
	p.press("5", "Enter")
	p.shows("No sample waits for a verdict")
	group := bustest.Await(p.T, s.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject("judged", "v"))
	for _, m := range group {
		a := bustest.Decode[schemas.Advantage](p.T, m)
		got := []float64{}
		for _, x := range a.Members {
			got = append(got, *x.Reward)
		}
		if !slices.Equal(got, []float64{0.75, 1, 0}) {
			p.Errorf("rewards %v", got)
		}
	}
}

// navigate goes from the list of runs to a sample and back by keys alone.
func (p *tab) navigate() {
	p.Helper()
	at := func(hash string) { p.Helper(); p.until("location.hash === " + quoted(hash)); p.awaitShown() }
	p.to("#/system")
	p.press("g", "r")
	at("#/runs")
	for !eval[bool](p, `document.activeElement.textContent === "signs"`) {
		p.press("j")
	}
	p.press("Enter")
	at("#/runs/signs")
	p.press("/", "p04")
	p.until(`document.querySelectorAll("a.row").length === 1 && document.querySelector("a.row").innerText.includes("QKZ")`)
	p.press("Escape", "j", "Enter")
	at("#/runs/signs/p04")
	p.press("j", "j", "k", "Enter")
	p.until(`/^#\/runs\/signs\/p04\/\d+$/.test(location.hash)`)
	p.awaitShown()
	p.press("u")
	at("#/runs/signs/p04")
	p.press("u")
	at("#/runs/signs")
	p.press("u")
	at("#/runs")
	p.press("?")
	p.shows("next and previous row or sample")
	p.press("Escape", "Tab")
	p.until(`!document.querySelector("dialog[open]")`)
}

// replay publishes a dead letter again, and drops another.
func (p *tab) replay(s *served) {
	p.Helper()
	p.to("#/dead")
	p.click(`a[href="#/dead/1"]`)
	p.click(`.tools button`)
	p.shows("Published again on mdr.v1.prompt.odd")
	p.to("#/dead/2")
	p.click(`.tools button:last-child`)
	p.click(`.tools button.bad`)
	p.shows("Dropped.")
	bustest.Until(p.T, "the replayed prompt is refused again", func() error {
		if n := s.Info(p.T, schemas.StreamDead).State; n.Msgs != 1 || n.LastSeq != 3 {
			return fmt.Errorf("%d letters, the last is %d", n.Msgs, n.LastSeq)
		}
		return nil
	})
}

// guide makes the images of the guide, with MEANDER_UI_GUIDE: the folder.
func (p *tab) guide(t *testing.T) {
	dir := os.Getenv("MEANDER_UI_GUIDE")
	if dir == "" {
		return
	}
	for _, g := range []struct {
		name, hash    string
		width, height int
		dark          bool
	}{
		{"run", "#/runs/signs", 1080, 860, false},
		{"group", "#/runs/signs/p04", 1080, 620, true},
		{"sample", "#/runs/signs/p04/3", 940, 1280, false},
		{"tokens", "#/runs/sums/q2/1", 1080, 780, true},
		{"phone", "#/runs/signs/p04", 390, 780, false},
	} {
		p.size(g.width, g.height)
		p.dark(g.dark)
		p.to(g.hash)
		if g.name == "tokens" {
			p.click(".tokens .tok[tabindex]")
		}
		eval[any](p, `scrollTo(0, 0)`)
		p.awaitShown()
		img, err := png.Decode(bytes.NewReader(p.shot(false)))
		if err != nil {
			t.Fatal(err)
		}
		var small bytes.Buffer
		if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&small, img); err != nil {
			t.Fatal(err)
		}
		if small.Len() > 150_000 {
			t.Errorf("page-%s.png has %d bytes; at most 150000 are for a guide", g.name, small.Len())
		}
		if err := os.WriteFile(filepath.Join(dir, "page-"+g.name+".png"), small.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p.size(1440, 900)
	p.dark(false)
}

// The page says that it reconnects while the server of the pipeline, or the page's own, is away. Then it goes on by
// itself, with all that came meanwhile.
func TestPage_Restarts(t *testing.T) {
	axe(t)
	s := servePage(t, nil, bustest.TCP)
	pipeline := s.startPipeline(t)
	s.publish(t, "r1", "a", "a fox", nil)
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	p := startBrowser(t).open(t, s.url)
	p.to("#/runs/r1")
	p.shows("connected", "a fox")

	pipeline.Stop()
	s.Options.Listen = strings.TrimPrefix(s.Server.ClientURL(), "nats://")
	if err := s.Server.Close(); err != nil {
		t.Fatal(err)
	}
	p.shows("Lost the server; retrying. If it stopped: meander up, or restart your NATS server. Figures are from ")
	p.save("broken-server-away")
	s.Start(t)
	p.until(`document.getElementById("banner").hidden`)
	s.startPipeline(t)
	s.publish(t, "r1", "b", "a hen", nil)
	p.shows("a hen")

	address := strings.TrimSuffix(strings.TrimPrefix(s.url, "http://"), "/")
	s.stop()
	p.shows("reconnecting", "This page cannot reach meander ui, which serves it. Start it again; the page reconnects "+
		"itself. Figures are from ")
	p.save("broken-page-away")
	p.to("#/system")
	p.shows("This page cannot reach meander ui", "Try again")
	p.to("#/runs/r1")
	s.publish(t, "r1", "c", "an owl", nil)
	bustest.Await(t, s.Bus, 3, schemas.StreamAdvantages)
	s.serve(t, func(c *ui.Config) { c.Listen = address })
	p.shows("connected", "an owl", "a hen")
}

// Each broken pipeline says what is wrong, and what to do.
func TestPage_Broken(t *testing.T) {
	axe(t)
	b := startBrowser(t)
	t.Run("nothing is stored", func(t *testing.T) {
		s := servePage(t, nil)
		p := b.open(t, s.url)
		p.shows("No run is stored yet", "meander up", "In another terminal, publish a prompt",
			"meander publish --run demo")
		p.until(`!document.querySelector(".wait")`)
		p.save("broken-empty")
	})
	t.Run("no sampler", func(t *testing.T) {
		s := servePage(t, nil)
		pipeline := s.startPipeline(t)
		bustest.Until(t, "the lane is announced", func() error {
			if lanes := get[object](t, s, "system")["lanes"].([]any); len(lanes) == 0 {
				return errors.New("none")
			}
			return nil
		})
		pipeline.Stop()
		s.startAllButSamplers(t)
		prompt := bustest.Encode(t, &schemas.Prompt{UID: "a", Prompt: "a fox"})
		if _, err := s.PublishPrompt(t.Context(), "waits", prompt, nil); err != nil {
			t.Fatal(err)
		}
		p := b.open(t, s.url)
		p.shows("No sampler is running: 1 prompt is waiting", "Start one beside it: meander-sampler --model synthetic",
			"Or start all services again: meander up --model synthetic")
		p.save("broken-no-sampler-runs")
		p.to("#/runs/waits")
		p.shows("No sampler is running", "waiting for a sampler")
		p.save("broken-no-sampler-run")
	})
	t.Run("full stream", func(t *testing.T) {
		s := servePage(t, nil)
		s.startPipeline(t)
		s.publish(t, "r1", "a", "a fox", nil)
		bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
		full := int64(s.Info(t, schemas.StreamSteps).State.Bytes) + 100
		s.Change(t, schemas.StreamSteps, func(c *jetstream.StreamConfig) { c.MaxBytes = full })
		s.publish(t, "r1", "b", "a hen", nil)
		p := b.open(t, s.url)
		p.to("#/runs/r1")
		p.shows("MDR_STEPS is full", "samples wait, and nothing is lost",
			"meander streams limit --max-steps-bytes 1MiB", "waiting for space")
		p.save("broken-full-run")
		p.to("#/system")
		p.until(`[...document.querySelectorAll("tr")].some((r) => r.innerText.includes("MDR_STEPS") && r.innerText.includes("full"))`)
		p.save("broken-full-system")
	})
	t.Run("refused prompts", func(t *testing.T) {
		s := servePage(t, nil)
		s.startPipeline(t)
		bad := &schemas.Prompt{UID: "a", Prompt: "a fox"}
		bad.Height = new(int64(17))
		data, err := schemas.Encode(bad)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if _, err := s.PublishPrompt(t.Context(), "odd", data, nil); err != nil {
				t.Fatal(err)
			}
		}
		bustest.Dead(t, s.Bus, 2)
		p := b.open(t, s.url)
		p.until(`document.getElementById("deadcount").textContent === "2"`)
		p.shows("1 refused", "2 dead letters: prompts of odd were refused")
		p.until(`document.querySelector("tbody .meter .lost")`)
		p.save("broken-refused-runs")
		p.to("#/runs/odd")
		p.shows("The prompt was refused: height: 17; must be a multiple of 16",
			"Correct height, and publish the prompt again with another uid", "1 refused")
		p.save("broken-refused-run")
		p.to("#/dead")
		p.shows("a multiple", "What to do: correct a prompt that was refused", "again with another uid", "also #1")
		p.save("broken-refused-dead")
	})
}

// jank is what the page has cost: the longest task that blocked it, in milliseconds, elements, and bytes in use.
type jank struct {
	Longest, Blocked, Elements, Heap int
}

// measure returns what the page has cost since the last call.
func (p *tab) measure() (j jank) {
	p.Helper()
	p.do("HeapProfiler.collectGarbage", nil)
	j = eval[jank](p, `(() => { const t = window.seen.tasks; window.seen.tasks = []; return { Longest: Math.max(0, ...t), Blocked: t.reduce((a, b) => a + b, 0),
		Elements: document.querySelectorAll("*").length, Heap: performance.memory.usedJSHeapSize }; })()`)
	return j
}

// A run of 10 000 groups, and one more for each that closes while one looks, and a group of 1 000 images cost the page
// no more than small ones: no long task, few elements, little memory.
func TestPage_Large(t *testing.T) {
	axe(t)
	s := servePage(t, nil)
	pipeline := s.startPipeline(t)
	s.publish(t, "r1", "a", "a fox", nil)
	s.publish(t, "many", "images", "a hen", func(p *schemas.Prompt) { p.GroupSize = new(int64(1000)) })
	bustest.Await(t, s.Bus, 2, schemas.StreamAdvantages)
	record, err := s.Group(t.Context(), "r1", "a")
	if err != nil {
		t.Fatal(err)
	}
	result := bustest.Decode[schemas.Advantage](t, bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages,
		schemas.AdvantageSubject("r1", "a"))[schemas.AdvantageSubject("r1", "a")])
	pipeline.Stop()
	add := func(from, to int) {
		t.Helper()
		for i := from; i < to; i++ {
			uid := schemas.UID(fmt.Sprintf("g%05d", i))
			g, a := *record, *result
			g.Run, g.UID, g.Group.Batch, g.Prompt = "big", uid, string(uid), fmt.Sprintf("owl %d", i)
			a.Run, a.UID, a.Batch, a.Mean = "big", uid, string(uid), new(float64(i%97)/97)
			if _, err := s.Publish(t.Context(), &g); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Publish(t.Context(), &a); err != nil {
				t.Fatal(err)
			}
		}
	}
	add(0, 10_000)
	p := startBrowser(t).open(t, s.url)
	p.to("#/runs/r1")
	p.shows("1 of 1 group")
	small := p.measure()
	check := func(what string) {
		t.Helper()
		j := p.measure()
		t.Logf("%s: longest task %d ms, %d elements, %.1f MiB", what, j.Longest, j.Elements, float64(j.Heap)/(1<<20))
		// On a busy machine a small run has long tasks, too.
		if j.Longest > 500+3*small.Longest || j.Elements > 4000 || j.Heap > small.Heap+32<<20 {
			t.Errorf("%s costs %+v; a small run %+v", what, j, small)
		}
	}
	p.to("#/runs/big")
	p.shows("of 10,000 groups")
	check("a run of 10 000 groups")
	for range 20 {
		at := eval[string](p, `document.querySelector("a.row").innerText`)
		p.click(".pager button:last-child")
		p.until(`document.querySelector("a.row").innerText !== ` + quoted(at))
	}
	check("20 pages of it")
	p.to("#/runs/big?order=oldest")
	p.to("#/runs/big")
	add(10_000, 10_500)
	p.shows("of 10,500 groups", "owl 10499")
	check("500 groups that closed meanwhile")
	p.to("#/runs/many/images")
	for seen := 64; ; seen = min(1000, seen+64) {
		p.until(`document.querySelector(".head .num").textContent.endsWith(" to ` + fmt.Sprint(seen) + `")`)
		eval[any](p, `(async () => { for (const i of document.images) { i.loading = "eager"; await i.decode(); } })()`)
		if seen == 1000 {
			break
		}
		p.click(".head .tools button:last-child")
	}
	check("a group of 1 000 images")
}

// A browser without the token is asked for it, keeps the place that it was to show, and is asked again when the command
// has another token.
func TestPage_SignIn(t *testing.T) {
	chromium(t)
	s := servePage(t, func(c *ui.Config) { c.Token = "open-sesame" })
	p := startBrowser(t).open(t, s.url)
	give := func(token string) {
		eval[any](p, fmt.Sprintf(`document.getElementById("token").value = %q; document.querySelector("form button").click()`, token))
	}
	eval[any](p, `location.hash = "#/system"`)
	for _, name := range []string{"signin", "signin-wrong"} {
		for _, width := range []int{390, 1440} {
			for _, dark := range []bool{false, true} {
				p.size(width, 800)
				p.dark(dark)
				p.shows("Sign in", "This page asks for a token")
				if over := eval[int](p, "document.documentElement.scrollWidth - innerWidth"); over > 0 {
					t.Errorf("at %d px it scrolls sideways by %d", width, over)
				}
				p.save(fmt.Sprintf("%s-%d-%s", name, width, map[bool]string{true: "dark", false: "light"}[dark]))
			}
		}
		if name == "signin" {
			give("open")
			p.shows("That is not the token of this page")
		}
	}
	give(" open-sesame ")
	p.until(`location.hash === "#/system" && location.search === "" && document.body.innerText.includes("MDR_STEPS")`)
	address := strings.TrimSuffix(strings.TrimPrefix(s.url, "http://"), "/")
	s.stop()
	s.serve(t, func(c *ui.Config) { c.Listen, c.Token = address, "another" })
	p.shows("Sign in")
	p.do("Page.navigate", object{"url": s.url + ui.TokenQuery + "another#/system"})
	p.until(`location.hash === "#/system" && location.search === "" && document.body.innerText.includes("MDR_STEPS")`)
}
