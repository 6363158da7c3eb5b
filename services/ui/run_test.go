package ui_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image/png"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
)

// The page shows what pkg/results reads.
func TestServe_Run(t *testing.T) {
	t.Setenv("PATH", t.TempDir()) // no tesseract: the run does not need it, so does not wait for it
	s := servePage(t, nil)
	s.startPipeline(t)
	s.publish(t, "r1", "a", "a fox", nil)
	s.publish(t, "r1", "b", "a hen", nil)
	s.publish(t, "r1", "judged", "an owl", func(p *schemas.Prompt) {
		p.Reward, p.Deadline = []schemas.RewardSpec{{Name: "external"}}, new(time.Now().Add(time.Hour).UnixNano())
	})
	bustest.Await(t, s.Bus, 2, schemas.StreamAdvantages)
	bustest.Await(t, s.Bus, 6, schemas.StreamTrajectories)
	want, err := results.Read(t.Context(), s.Bus, "r1")
	if err != nil {
		t.Fatal(err)
	}
	var run object
	bustest.Until(t, "the run on the page", func() error {
		run = get[object](t, s, "runs/r1")
		waits := fmt.Sprint(run["waits"])
		if !strings.Contains(waits, "2 samples wait for a verdict") ||
			!strings.Contains(waits, "meander verdict --run r1") {
			return errors.New(waits)
		}
		return nil
	})
	stages := map[string]string{}
	for _, x := range run["stages"].([]any) {
		st := x.(object)
		stages[st["name"].(string)] = fmt.Sprintf("%v of %v %v", st["done"], st["of"], st["counts"])
	}
	if got := fmt.Sprint(stages); got != "map[advantage:2 of 3 groups intake:3 of 3 groups "+
		"reward:4 of 6 samples sampler:6 of 6 samples]" {
		t.Errorf("stages %s", got)
	}
	if got := get[object](t, s, "runs")["runs"].([]any)[0].(object); got["run"] != "r1" || got["groups"] != 3.0 ||
		got["open_groups"] != 1.0 ||
		got["samples"] != 6.0 ||
		got["scored"] != 4.0 ||
		got["steps"] != 18.0 {
		t.Errorf("line of the run %v", got)
	}
	for _, g := range want.Groups[:2] {
		s.checkGroup(t, g)
	}
	if got := get[object](t, s, "runs/r1/groups/judged"); got["status"] != outcomes.Open ||
		got["samples"].([]any)[0].(object)["status"] != "made" {
		t.Errorf("open group %v", got)
	}
	if points := get[object](t, s, "runs/r1/curve")["points"].([]any); len(points) != 2 {
		t.Errorf("curve %v", points)
	}
	system := get[object](t, s, "system")
	if lanes := system["lanes"].([]any); len(lanes) != 1 || lanes[0].(object)["samplers"] != 1.0 ||
		len(system["present"].([]any)) != 2 {
		t.Errorf("system %v", system)
	}
	if versions := get[object](t, s, "lanes/synthetic")["versions"].([]any); len(versions) != 1 {
		t.Errorf("versions %v", versions)
	}
	for path, want := range map[string]int{
		"/api/runs/none": 404, "/api/runs/a%20b": 400, "/api/runs/r1/groups/none": 404,
		"/api/runs/r1/groups/a/9": 404, "/api/runs/r1/groups/a/x": 400,
		"/api/runs/r1/groups?limit=201": 400, "/api/runs/r1/groups?offset=-1": 400, "/api/runs/r1/groups?order=odd": 400,
		"/media/r1/a/0/7":     404,
		"/media/r1/a/0/video": 404, "/api/dead/0": 400, "/api/dead/7": 404, "/api/dead?before=x": 400,
		"/api/lanes/a%20b": 400, "/api/runs/*": 400,
	} {
		if status, _, body := s.ask(t, "GET", path, nil); status != want {
			t.Errorf("%s: %d, want %d: %s", path, status, want, body)
		}
	}
}

// checkGroup compares a group of run r1 and its samples on the page with what pkg/results has.
func (s *served) checkGroup(t *testing.T, g *results.Group) {
	t.Helper()
	got := get[object](t, s, "runs/r1/groups/"+string(g.UID))
	if got["mean"] != *g.Mean || got["std"] != *g.Std || got["status"] != g.Status || got["prompt"] != g.Prompt {
		t.Errorf("group %v, want %+v", got, g.GroupResult)
	}
	for i, m := range g.Best() {
		x := got["samples"].([]any)[i].(object)
		if x["sample_index"] != float64(m.SampleIndex) || x["reward"] != *m.Reward || x["advantage"] != *m.Advantage ||
			len(x["scores"].([]any)) != len(m.Scores) {
			t.Errorf("sample %v, want %+v", x, m.SampleResult)
		}
		one := get[object](t, s, fmt.Sprintf("runs/r1/groups/%s/%d", g.UID, m.SampleIndex))
		if logProbs := one["log_probs"].([]any); len(logProbs) != 3 || logProbs[1] != *m.LogProbs[1] ||
			logProbs[0] != nil {
			t.Errorf("log-probs %v, want %v", one["log_probs"], m.LogProbs)
		}
		if facts := fmt.Sprint(one["facts"]); !strings.Contains(facts, fmt.Sprint(m.Seed)) ||
			!strings.Contains(facts, m.Digest) {
			t.Errorf("facts %s lack the seed or the digest of %+v", facts, m)
		}
		for _, kind := range append([]string{"image"}, states(one)...) {
			s.checkMedia(t, fmt.Sprintf("/media/r1/%s/%d/%s", g.UID, m.SampleIndex, kind))
		}
	}
}

// checkMedia checks that an image is sent as an image, and once.
func (s *served) checkMedia(t *testing.T, path string) {
	t.Helper()
	status, header, body := s.ask(t, "GET", path, nil)
	if _, err := png.Decode(bytes.NewReader(body)); status != 200 || header.Get("Content-Type") != "image/png" ||
		err != nil {
		t.Errorf("%s: %d %s %v", path, status, header.Get("Content-Type"), err)
	}
	if !strings.Contains(header.Get("Content-Security-Policy"), "sandbox") {
		t.Errorf("%s has the policy %q", path, header.Get("Content-Security-Policy"))
	}
	again := func(r *http.Request) { r.Header.Set("If-None-Match", header.Get("ETag")) }
	if status, _, _ := s.ask(t, "GET", path, again); status != http.StatusNotModified {
		t.Errorf("%s again: %d", path, status)
	}
}

// states are the stored states of a sample that the page shows.
func states(sample object) (list []string) {
	for _, k := range sample["states"].([]any) {
		list = append(list, fmt.Sprint(k))
	}
	return list
}

// event is one server-sent event.
type event struct {
	name, id string
	data     object
}

// follow opens a stream of events; they end with stop.
func (s *served) follow(t *testing.T, query string, lastID string) (events <-chan event, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+"api/events?"+query, nil)
	if err != nil {
		t.Fatal(err)
	}
	if lastID != "" {
		r.Header.Set("Last-Event-ID", lastID)
	}
	answer, err := s.http.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	if got := answer.Header.Get("Content-Type"); answer.StatusCode != 200 || got != "text/event-stream" {
		t.Fatalf("events: %d %s", answer.StatusCode, got)
	}
	out, ended := make(chan event, 1000), make(chan struct{})
	go func() {
		defer close(ended)
		defer close(out)
		lines, e := bufio.NewScanner(answer.Body), event{}
		lines.Buffer(nil, 16<<20)
		for lines.Scan() {
			name, value, _ := strings.Cut(lines.Text(), ": ")
			switch name {
			case "event":
				e.name = value
			case "id":
				e.id = value
			case "data":
				_ = json.Unmarshal([]byte(value), &e.data)
			case "":
				if e.name != "" {
					out <- e
				}
				e = event{}
			}
		}
	}()
	stop = func() {
		cancel()
		answer.Body.Close()
		<-ended
	}
	t.Cleanup(stop)
	return out, stop
}

// await returns the rows of the next events until one has the status, and the id of the last event. What stands above
// the list is never older than the list: after groups come their counts.
func await(t *testing.T, events <-chan event, uid, status string) (uids []string, id string) {
	t.Helper()
	for {
		e := bustest.Receive(t, "an event with group "+uid, events)
		if e.name != "groups" {
			continue
		}
		counts := bustest.Receive(t, "the counts after groups", events)
		if _, revision, _ := strings.Cut(e.id, "-"); counts.name != "run" ||
			fmt.Sprint(counts.data["revision"]) != revision {
			t.Errorf("after groups %s comes %s %v", e.id, counts.name, counts.data)
		} else if open := counts.data["statuses"].(object)["open"]; open != nil &&
			counts.data["state"] != schemas.RunRunning {
			t.Errorf("%v, with %v open groups", counts.data["state"], open)
		}
		for _, x := range e.data["rows"].([]any) {
			r := x.(object)
			uids = append(uids, r["uid"].(string))
			if id = e.id; r["uid"] == uid && r["status"] == status {
				return uids, id
			}
		}
	}
}

// A page sees groups open and close. After a lost connection it gets what changed since, and nothing else; after a
// restart it is told to read all again.
func TestServe_Events(t *testing.T) {
	s := servePage(t, nil)
	s.startPipeline(t)
	s.publish(t, "r1", "a", "a fox", nil)
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	page := get[object](t, s, "runs/r1/groups")
	bustest.Until(t, "the result on the page", func() error {
		page = get[object](t, s, "runs/r1/groups")
		if got := fmt.Sprint(page["rows"]); !strings.Contains(got, "complete") {
			return errors.New(got)
		}
		return nil
	})
	since := fmt.Sprintf("%v-%v", page["epoch"], page["revision"])
	events, stop := s.follow(t, "run=r1&since="+since, "")
	s.publish(t, "r1", "b", "a hen", nil)
	uids, id := await(t, events, "b", "complete")
	if slices.Contains(uids, "a") {
		t.Errorf("group a did not change; events have %v", uids)
	}
	stop()
	s.publish(t, "r1", "c", "an owl", nil)
	bustest.Await(t, s.Bus, 3, schemas.StreamAdvantages)
	events, stop = s.follow(t, "run=r1&since="+since, id)
	if uids, _ = await(t, events, "c", "complete"); slices.Contains(uids, "a") || slices.Contains(uids, "b") {
		t.Errorf("only group c has changed since; events have %v", uids)
	}
	stop()
	s.stop()
	s.serve(t, nil)
	events, _ = s.follow(t, "run=r1", id)
	for e := bustest.Receive(t, "a reset", events); e.name != "reset"; e = bustest.Receive(t, "a reset", events) {
		if e.name == "groups" {
			t.Fatalf("before a reset comes %v", e)
		}
	}
	list, _ := s.follow(t, "", "")
	for {
		if e := bustest.Receive(t, "the list of runs", list); e.name == "runs" {
			if runs := e.data["runs"].([]any); len(runs) != 1 {
				t.Errorf("runs %v", runs)
			}
			break
		}
	}
	s.stop() // ends although pages follow
}

// A page learns that the server of the pipeline is away, and that it is back. Meanwhile questions have an answer.
func TestServe_Lost(t *testing.T) {
	s := servePage(t, nil, bustest.TCP)
	health := func(events <-chan event, says string) {
		t.Helper()
		for {
			e := bustest.Receive(t, "that the page says "+says, events)
			if fault, ok := e.data["fault"].(string); e.name == "health" && ok && (fault == "") == (says == "") &&
				strings.Contains(fault, says) {
				return
			}
		}
	}
	events, _ := s.follow(t, "", "")
	health(events, "")
	s.Options.Listen = strings.TrimPrefix(s.Server.ClientURL(), "nats://")
	if err := s.Server.Close(); err != nil {
		t.Fatal(err)
	}
	health(events, "Lost the server; retrying")
	if status, _, body := s.ask(t, "GET", "/api/runs", nil); status != http.StatusServiceUnavailable {
		t.Errorf("without a server: %d %s", status, body)
	}
	s.Start(t)
	health(events, "")
}

// A run without services says what it waits for, and so does a paused one.
func TestServe_Waits(t *testing.T) {
	s := servePage(t, nil)
	if got := get[object](t, s, "runs"); len(got["runs"].([]any)) != 0 {
		t.Errorf("an empty store has %v", got)
	}
	prompt := bustest.Encode(t, &schemas.Prompt{UID: "a", Prompt: "a fox"})
	if _, err := s.PublishPrompt(t.Context(), "r1", prompt, nil); err != nil {
		t.Fatal(err)
	}
	waits := func(says string) {
		t.Helper()
		bustest.Until(t, "that the page says "+says, func() error {
			got := fmt.Sprint(get[object](t, s, "runs/r1")["waits"])
			if !strings.Contains(got, says) {
				return errors.New(got)
			}
			return nil
		})
	}
	waits("1 message waits for intake, and none runs")
	s.startPipeline(t)
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	ask := &schemas.Control{Run: "r1", Action: schemas.ControlPause, By: "ann", Reason: "lunch"}
	if _, err := client.New(s.Bus).Control(t.Context(), ask); err != nil {
		t.Fatal(err)
	}
	waits("paused by ann: lunch")
	if got := get[object](t, s, "runs/r1")["state"]; got != "paused" {
		t.Errorf("state %v", got)
	}
}

// What comes from the stream is text, whatever it says; what is no event is left out; what is no image is not sent.
func TestServe_Hostile(t *testing.T) {
	s := servePage(t, nil)
	s.startPipeline(t)
	const evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \u2028 ' \" & {{x}} ${x}"
	s.publish(t, "r1", "a", evil, nil)
	m := bustest.Await(t, s.Bus, 2, schemas.StreamTrajectories)[schemas.TrajectorySubject("r1", "a", 0,
		schemas.StageMain)]
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	for _, path := range []string{"/api/runs/r1/groups", "/api/runs/r1/groups/a", "/api/runs/r1/groups/a/0"} {
		_, header, body := s.ask(t, "GET", path, nil)
		if bytes.ContainsAny(body, "<>\u2028") || header.Get("Content-Type") != "application/json" {
			t.Errorf("%s, %s, has %s", path, header.Get("Content-Type"), body)
		}
	}
	if got := get[object](t, s, "runs/r1/groups/a")["prompt"]; got != evil {
		t.Errorf("prompt %q, want %q", got, evil)
	}
	tr := bustest.Decode[schemas.Trajectory](t, m)
	tr.UID, tr.Media[0].Ref, tr.Media[0].Data = "forged", nil, []byte(
		"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
	)
	s.Forge(t, schemas.TrajectorySubject("r1", "forged", 0, schemas.StageMain), bustest.Encode(t, tr))
	s.Forge(t, schemas.GroupSubject("r1", "garbage"), []byte("<script>"))
	s.Forge(t, schemas.AdvantageSubject("r1", "garbage"), []byte{0xc1})
	status, header, body := s.ask(t, "GET", "/media/r1/forged/0/image", nil)
	if status == 200 || header.Get("Content-Type") != "application/json" || bytes.Contains(body, []byte("<svg")) {
		t.Errorf("a forged image: %d %s %s", status, header.Get("Content-Type"), body)
	}
	if got := get[object](t, s, "runs/r1/groups"); strings.Contains(fmt.Sprint(got), "garbage") {
		t.Errorf("groups %v", got)
	}
	for _, path := range []string{
		"/api/runs/..%2f..", "/media/..%2f/a/0/image", "/api/events?run=a%0ab", "/..%2f..%2fui.go", "/ui.go",
	} {
		if status, _, body := s.ask(t, "GET", path, nil); status < 400 {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
}

// Thousands of groups come in pages: each group once, in the order that was asked for.
func TestServe_Paging(t *testing.T) {
	s := servePage(t, nil)
	pipeline := s.startPipeline(t)
	s.publish(t, "r1", "a", "a fox", nil)
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	pipeline.Stop()
	record, err := s.Group(t.Context(), "r1", "a")
	if err != nil {
		t.Fatal(err)
	}
	closed := bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	result := bustest.Decode[schemas.Advantage](t, closed[schemas.AdvantageSubject("r1", "a")])
	const groups = 450
	for i := range groups {
		uid := schemas.UID(fmt.Sprintf("g%04d", i))
		g, a := *record, *result
		g.Run, g.UID, g.Group.Batch, g.Prompt = "big", uid, string(uid), fmt.Sprintf("owl %d", i)
		g.Group.Metadata = fmt.Appendf(nil, "\x81\xabdata_source\xa3%03d", i)
		if _, err := s.Publish(t.Context(), &g); err != nil {
			t.Fatal(err)
		}
		if a.Run, a.UID, a.Batch, a.Mean = "big", uid, string(uid), new(float64(i%7)/7); i%3 == 0 {
			continue
		}
		if _, err := s.Publish(t.Context(), &a); err != nil {
			t.Fatal(err)
		}
	}
	read := func(query string, want int) (uids []string, means []float64) {
		t.Helper()
		for len(uids) < want {
			page := get[object](t, s, fmt.Sprintf("runs/big/groups?limit=200&offset=%d&%s", len(uids), query))
			rows := page["rows"].([]any)
			if page["total"] != float64(want) || len(rows) != min(200, want-len(uids)) {
				t.Fatalf("%s: a page of %d rows of %v, want %d in all", query, len(rows), page["total"], want)
			}
			for _, x := range rows {
				r := x.(object)
				uids = append(uids, r["uid"].(string))
				if r["mean"] != nil {
					means = append(means, r["mean"].(float64))
				}
			}
		}
		return uids, means
	}
	newest, _ := read("", groups)
	oldest, _ := read("order=oldest", groups)
	slices.Reverse(oldest)
	if !slices.Equal(newest, oldest) || newest[0] != "g0449" {
		t.Errorf("newest %v\noldest %v", newest, oldest)
	}
	if sorted := slices.Sorted(slices.Values(newest)); len(slices.Compact(sorted)) != groups {
		t.Error("pages have a group twice")
	}
	_, best := read("order=best", groups)
	_, worst := read("order=worst", groups)
	if slices.Reverse(worst); len(best) != groups*2/3 || !slices.Equal(best, worst) ||
		!slices.IsSortedFunc(worst, func(a, b float64) int { return int(7 * (b - a)) }) {
		t.Errorf("best %v\nworst %v", best, worst)
	}
	if open, _ := read("status=open", groups/3); open[0] != "g0447" {
		t.Errorf("open %v", open)
	}
	if found, _ := read("text="+url.QueryEscape("OWL 44"), 11); found[10] != "g0044" {
		t.Errorf("found %v", found)
	}
	curve := get[object](t, s, "runs/big/curve?points=50")
	points, named := curve["points"].([]any), 0
	for _, p := range points {
		sources, _ := p.(object)["sources"].(object)
		named += len(sources)
	}
	if listed := len(curve["data_sources"].([]any)); listed != 100 || named != listed {
		t.Errorf("%d data sources are listed, and points have %d", listed, named)
	}
	if n := points[len(points)-1].(object)["number"]; len(points) > 50 || n != float64(groups*2/3) {
		t.Errorf("%d points; the last is of group %v", len(points), n)
	}
}

// Dead letters come in pages, the newest first, each once; one shows its original.
func TestServe_Dead(t *testing.T) {
	s := servePage(t, nil)
	const letters = 130
	for i := range letters {
		run := schemas.Run([]string{"r1", "r2"}[i%2])
		m := &bus.Message{
			Subject: schemas.PromptSubject(run),
			Data:    bustest.Encode(t, &schemas.Prompt{UID: "p", Prompt: "<b>"}),
			Stream:  schemas.StreamPrompts,
			Seq:     uint64(i + 1),
		}
		reason := fmt.Sprintf("reason %d", i)
		if err := s.Bus.Dead(t.Context(), schemas.ServiceIntake, schemas.CodeInvalid, reason, m); err != nil {
			t.Fatal(err)
		}
	}
	for query, want := range map[string]int{"": letters, "run=r1": letters / 2, "run=none": 0} {
		var ids []float64
		for before := ""; ; {
			page := get[object](t, s, "dead?"+query+before)
			for _, x := range page["letters"].([]any) {
				ids = append(ids, x.(object)["id"].(float64))
			}
			if page["before"] == nil {
				break
			}
			before = fmt.Sprintf("&before=%v", page["before"])
		}
		falling := slices.IsSortedFunc(ids, func(a, b float64) int { return int(b - a) })
		if len(ids) != want || !falling || len(slices.Compact(ids)) != want {
			t.Errorf("%s: %d letters, want %d: %v", query, len(ids), want, ids)
		}
	}
	one := get[object](t, s, "dead/130")
	if one["reason"] != "reason 129" || one["original"].(object)["prompt"] != "<b>" || one["run"] != "r2" ||
		one["fix"] != "Correct the prompt, and publish it again with another uid" {
		t.Errorf("letter %v", one)
	}
}

// What failed has what to do about it: a group, its samples, and nothing that went well.
func TestServe_Fixes(t *testing.T) {
	s := servePage(t, nil)
	s.startPipeline(t)
	s.publish(t, "r1", "good", "a fox", nil)
	s.publish(t, "r1", "late", "a hen", func(p *schemas.Prompt) {
		p.Reward = []schemas.RewardSpec{{Name: "external"}}
		p.Deadline = new(time.Now().Add(time.Second).UnixNano())
	})
	bustest.Await(t, s.Bus, 2, schemas.StreamAdvantages)
	for uid, want := range map[string][2]string{
		"good": {"<nil>", "<nil>"},
		"late": {"See its samples with 'meander show --run r1 late'", "The sample is stored: when the cause is gone, score it with 'meander rescore --run r1'"},
	} {
		g := get[object](t, s, "runs/r1/groups/"+uid)
		sample := g["samples"].([]any)[0].(object)
		if group, one := fmt.Sprint(g["fix"]), fmt.Sprint(sample["fix"]); !strings.HasPrefix(group, want[0]) ||
			!strings.HasPrefix(one, want[1]) {
			t.Errorf("%s (%v, a sample %v): %q, a sample %q", uid, g["status"], sample["status"], group, one)
		}
	}
	if os.Getenv("MEANDER_UI_AXE") == "" {
		return // in a browser it is 'make ui-test'
	}
	checker, p := axe(t), startBrowser(t).open(t, s.url)
	p.to("#/runs/r1/late")
	p.shows("What to do: See its samples with meander show --run r1 late", "score it with meander rescore --run r1")
	p.everywhere(checker, "failed", "#/runs/r1/late")
	p.everywhere(checker, "failed-sample", "#/runs/r1/late/0")
}

// Two runs are compared by the prompts that both have: by uid, or else by text, each group once.
func TestServe_Compare(t *testing.T) {
	s := servePage(t, nil)
	s.startPipeline(t)
	for _, p := range []struct{ run, uid, text string }{
		{"r1", "a", "a fox"},
		{"r1", "b", "a hen"},
		{"r1", "c", "a hen"},
		{"r1", "only1", "an owl"},
		{"r2", "a", "a fox"},
		{"r2", "x", "a hen"},
		{"r2", "only2", "a cow"},
	} {
		s.publish(t, schemas.Run(p.run), schemas.UID(p.uid), p.text, nil)
	}
	bustest.Await(t, s.Bus, 7, schemas.StreamAdvantages)
	var got object
	bustest.Until(t, "all results on the page", func() error {
		got = get[object](t, s, "compare?a=r1&b=r2")
		if n := got["better"].(float64) + got["worse"].(float64) + got["equal"].(float64); n != 2 {
			return fmt.Errorf("%v pairs have a change", n)
		}
		return nil
	})
	names := []string{}
	for _, x := range got["pairs"].([]any) {
		p := x.(object)
		a, b := p["a"].(object), p["b"].(object)
		names = append(names, fmt.Sprintf("%v-%v", a["uid"], b["uid"]))
		if want := b["mean"].(float64) - a["mean"].(float64); p["change"] != want {
			t.Errorf("change %v, want %v", p["change"], want)
		}
	}
	if slices.Sort(names); !slices.Equal(names, []string{"a-a", "b-x"}) || got["total"] != 2.0 {
		t.Errorf("pairs %v of %v", names, got["total"])
	}
	if status, _, _ := s.ask(t, "GET", "/api/compare?a=r1", nil); status != http.StatusBadRequest {
		t.Errorf("a comparison with nothing: %d", status)
	}
}
