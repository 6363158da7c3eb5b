package integration_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/micro"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

var update = flag.Bool("update", false, "write the tables of documents")

// family is one metric as a program exports it.
type family struct {
	kind, help string
	labels     map[string]bool
	samples    map[string]float64 // by labels as written; of a histogram, its counts
}

// scrape reads /metrics, without what is about Go and the process. A busy server may not answer in time what the
// metrics of streams say; then it asks again.
func scrape(t *testing.T, addr string) (families map[string]*family) {
	t.Helper()
	bustest.Until(t, "the metrics of streams", func() error {
		if families = scrapeOnce(t, addr); total(families, "meander_stream_up") == 0 {
			return errors.New("the server has not answered")
		}
		return nil
	})
	return families
}

func scrapeOnce(t *testing.T, addr string) map[string]*family {
	t.Helper()
	resp, err := http.Get("http://" + addr + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("metrics of %s: %s %v\n%s", addr, resp.Status, err, body)
	}
	families := map[string]*family{}
	of := func(name string) *family {
		if families[name] == nil {
			families[name] = &family{labels: map[string]bool{}, samples: map[string]float64{}}
		}
		return families[name]
	}
	label := regexp.MustCompile(`([a-z_]+)="`)
	lines := bufio.NewScanner(strings.NewReader(string(body)))
	for lines.Scan() {
		fields := strings.SplitN(lines.Text(), " ", 4)
		if name := strings.TrimPrefix(fields[0], "# "); fields[0] == "#" && strings.HasPrefix(fields[2], "meander_") {
			if fields[1] == "HELP" {
				of(fields[2]).help = fields[3]
			} else {
				of(fields[2]).kind = fields[3]
			}
		} else if strings.HasPrefix(name, "meander_") {
			series, value, _ := strings.Cut(lines.Text(), "} ")
			name, labels, found := strings.Cut(series, "{")
			if !found {
				name, value, _ = strings.Cut(series, " ")
			}
			f, histogram := families[name], strings.HasSuffix(name, "_count")
			if f == nil {
				if f = families[strings.TrimSuffix(name, "_count")]; f == nil || !histogram {
					continue // a bucket or a sum
				}
			}
			for _, m := range label.FindAllStringSubmatch(labels, -1) {
				f.labels[m[1]] = true
			}
			number, err := strconv.ParseFloat(value, 64)
			if err != nil {
				t.Fatalf("%q: %v", lines.Text(), err)
			}
			f.samples[labels] = number
		}
	}
	return families
}

// total is the sum of the samples whose labels contain all of what is given.
func total(families map[string]*family, name string, labels ...string) (sum float64) {
	f := families[name]
	if f == nil {
		return -1
	}
	for have, v := range f.samples {
		if !slices.ContainsFunc(labels, func(l string) bool { return !strings.Contains(have, l) }) {
			sum += v
		}
	}
	return sum
}

// healthAddr waits until a program has written where it serves its metrics.
func healthAddr(t *testing.T, log *logbook) string {
	t.Helper()
	said := regexp.MustCompile(`"addr":"([^"]+)","time":"[^"]*","message":"health endpoint"|health endpoint addr=(\S+)`)
	var addr string
	bustest.Until(t, "the health endpoint", func() error {
		m := said.FindStringSubmatch(log.String())
		if m == nil {
			return fmt.Errorf("not in %q", log.String())
		}
		addr = m[1] + m[2]
		return nil
	})
	return addr
}

// littleRun makes two groups in a batch, and one prompt that is refused.
func littleRun(t *testing.T, b *bus.Bus) {
	t.Helper()
	c := client.New(b)
	for i := range 2 {
		p := small(schemas.UID(fmt.Sprintf("g%d", i)))
		p.Batch = &schemas.BatchSpec{ID: "b", Groups: 2}
		if _, err := c.Publish(t.Context(), "metrics", p); err != nil {
			t.Fatal(err)
		}
	}
	advantages(t, c, "metrics", 2)
	if _, err := b.PublishPrompt(t.Context(), "metrics", []byte("no prompt"), nil); err != nil {
		t.Fatal(err)
	}
	bustest.Dead(t, b, 1)
}

// checkLittleRun compares what a pipeline counted with what littleRun made.
func checkLittleRun(t *testing.T, families map[string]*family) {
	t.Helper()
	for _, want := range []struct {
		metric string
		labels []string
		value  float64
	}{
		{"meander_intake_prompts_total", nil, 2},
		{"meander_intake_requests_total", nil, 8},
		{"meander_intake_dead_total", []string{`code="decode"`, `stream="MDR_PROMPTS"`}, 1},
		{"meander_intake_deliveries_total", []string{`delivery="first"`}, 3},
		{"meander_intake_resolving_prompts", nil, 0},
		{"meander_intake_stalled_publishes", nil, 0},
		{"meander_sampler_images_total", []string{`stop_reason="completed"`}, 8},
		{"meander_sampler_images_total", []string{`stop_reason="failed"`}, 0},
		{"meander_sampler_image_seconds", nil, 8},
		{"meander_sampler_denoising_samples", nil, 0},
		{"meander_sampler_joining_samples", nil, 0},
		{"meander_sampler_publish_pending_bytes", nil, 0},
		{"meander_sampler_deliveries_total", []string{`delivery="first"`}, 8},
		{"meander_reward_rewards_total", []string{`status="scored"`}, 8},
		{"meander_advantage_groups_total", []string{`status="complete"`}, 2},
		{"meander_advantage_batches_total", []string{`status="complete"`}, 1},
		{"meander_advantage_open_groups", nil, 0},
		{"meander_stream_up", nil, 1},
		{"meander_stream_messages", []string{`stream="MDR_TRAJECTORIES"`}, 8},
		{"meander_queue_waiting_messages", nil, 0},
	} {
		if got := total(families, want.metric, want.labels...); got != want.value {
			t.Errorf("%s%v is %v, want %v", want.metric, want.labels, got, want.value)
		}
	}
	steps := total(families, "meander_sampler_steps_total")
	evaluations, filled := total(families, "meander_sampler_step_seconds"),
		total(families, "meander_sampler_batch_fill_ratio")
	if steps < 8 || evaluations < 1 || evaluations > steps || filled != evaluations {
		t.Errorf("%v steps in %v evaluations, %v fills; want at least a step for each image, and a fill for each "+
			"evaluation",
			steps, evaluations, filled)
	}
	stages := map[string]bool{}
	for labels := range families["meander_queue_in_hand_messages"].samples {
		stages[regexp.MustCompile(`stage="([a-z]+)"`).FindStringSubmatch(labels)[1]] = true
	}
	if got := slices.Sorted(maps.Keys(stages)); !slices.Equal(got,
		[]string{"advantage", "advisories", "intake", "reward", "sampler"}) {
		t.Errorf("queues of %v, want those of every stage", got)
	}
}

// tableOf lists metrics for people.
func tableOf(families map[string]*family) string {
	var b strings.Builder
	b.WriteString("| metric | kind | labels | meaning |\n|---|---|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(families)) {
		f := families[name]
		labels := ""
		for i, l := range slices.Sorted(maps.Keys(f.labels)) {
			if i > 0 {
				labels += ", "
			}
			labels += "`" + l + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", name, f.kind, labels, f.help)
	}
	return b.String()
}

// Four programs: each counts its own work, intake shows the queues, and the table and the
// board name what there is.
func TestMetrics_Programs(t *testing.T) {
	t.Parallel()
	dir, url := t.TempDir(), natsServer(t)
	programs := map[string]*process{}
	for _, service := range []string{"intake", "sampler", "reward", "advantage"} {
		args := []string{"--nats-url", url, "--health-addr", "127.0.0.1:0", "--log-format", "json"}
		if service == "sampler" {
			args = append(args, "--model", "synthetic")
		}
		programs[service] = launch(t, dir, program(t, "meander-"+service), args...)
	}
	b, err := bus.Connect(t.Context(), bus.Config{URL: url, Name: "test"}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.Ready(limited(t)); err != nil {
		t.Fatal(err)
	}
	littleRun(t, b)
	harness.AwaitIdle(t, b)

	all := map[string]*family{}
	for service, p := range programs {
		families := scrape(t, healthAddr(t, p.log))
		for name, f := range families {
			owner := strings.Split(name, "_")[1]
			if owner == "stream" || owner == "queue" || owner == "janitor" {
				owner = "intake"
			}
			if owner != service {
				t.Errorf("%s exports %s", service, name)
			}
			all[name] = f
		}
	}
	checkLittleRun(t, all)
	checkNames(t, all)
	inDocument(t, "deploy/guide/appendix.md", "metrics", tableOf(all))
	checkBoard(t, all)
}

// checkNames holds names to the scheme of services/internal/instrument.
func checkNames(t *testing.T, families map[string]*family) {
	t.Helper()
	for name, f := range families {
		_, histogram := strings.CutSuffix(name, "_seconds")
		if !histogram {
			_, histogram = strings.CutSuffix(name, "_ratio")
		}
		want := "gauge"
		switch {
		case strings.HasSuffix(name, "_total"):
			want = "counter"
		case histogram:
			want = "histogram"
		}
		if f.kind != want || f.help == "" {
			t.Errorf("%s is a %s with help %q; its name says %s", name, f.kind, f.help, want)
		}
	}
}

// checkBoard asks whether the board has only metrics and labels that exist, and leaves
// no service out.
func checkBoard(t *testing.T, families map[string]*family) {
	t.Helper()
	var board any
	if err := json.Unmarshal([]byte(read(t, "deploy/grafana/meander.json")), &board); err != nil {
		t.Fatal(err)
	}
	shown := map[string]bool{}
	metric := regexp.MustCompile(`(meander_[a-z_]+)(?:\{([^}]*)\})?`)
	matcher := regexp.MustCompile(`([a-z_]+)\s*(?:=~|!~|!=|=)`)
	grouping := regexp.MustCompile(`by \(([a-z_, ]*)\)`)
	for _, expr := range expressions(board) {
		found := metric.FindAllStringSubmatch(expr, -1)
		if len(found) == 0 {
			t.Errorf("board: %q has no metric of meander", expr)
		}
		known := map[string]bool{"job": true, "instance": true, "le": true}
		for _, m := range found {
			name := m[1]
			f := families[name]
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				if base, ok := strings.CutSuffix(name, suffix); ok && families[base] != nil &&
					families[base].kind == "histogram" {
					f, name = families[base], base
				}
			}
			if f == nil || f.kind == "histogram" && name == m[1] {
				t.Errorf("board: %q asks for %s, which nobody exports", expr, m[1])
				continue
			}
			shown[strings.Split(name, "_")[1]] = true
			maps.Copy(known, f.labels)
			for _, l := range matcher.FindAllStringSubmatch(m[2], -1) {
				if !f.labels[l[1]] {
					t.Errorf("board: %q: %s has no label %s", expr, name, l[1])
				}
			}
		}
		for _, m := range grouping.FindAllStringSubmatch(expr, -1) {
			for l := range strings.SplitSeq(m[1], ",") {
				if l = strings.TrimSpace(l); !known[l] {
					t.Errorf("board: %q: no metric in it has a label %s", expr, l)
				}
			}
		}
	}
	if got := slices.Sorted(maps.Keys(shown)); !slices.Equal(got,
		[]string{"advantage", "intake", "janitor", "queue", "reward", "sampler", "stream"}) {
		t.Errorf("board: it shows %v, want something of everything", got)
	}
}

// expressions are the queries of a board, wherever they are.
func expressions(board any) (out []string) {
	switch b := board.(type) {
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(b)) {
			if text, ok := b[key].(string); ok && key == "expr" {
				out = append(out, text)
			}
			out = append(out, expressions(b[key])...)
		}
	case []any:
		for _, item := range b {
			out = append(out, expressions(item)...)
		}
	}
	return out
}

// One process with two copies of each service: their numbers add up, and service
// discovery lists all of them.
func TestMetrics_CopiesAddUp(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	up := launch(t, dir, program(t, "meander"), "up", "--model", "synthetic", "--listen", "127.0.0.1:0",
		"--replicas", "2", "--batch", "4", "--workers", "1", "--metrics-addr", "127.0.0.1:0")
	addr := healthAddr(t, up.log)
	info := running(t, dir)
	b, err := bus.Connect(t.Context(), bus.Config{URL: info.URL, Token: info.Token, Name: "test"}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	littleRun(t, b)
	harness.AwaitIdle(t, b)
	families := scrape(t, addr)
	checkLittleRun(t, families)
	if got := total(families, "meander_sampler_batch_places"); got != 8 {
		t.Errorf("places %v, want 2 copies of 4", got)
	}

	inbox := b.Conn().NewInbox()
	replies, err := b.Conn().SubscribeSync(inbox)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Conn().PublishRequest("$SRV.PING", inbox, nil); err != nil {
		t.Fatal(err)
	}
	found := map[string]int{}
	for range 8 {
		m, err := replies.NextMsg(20 * time.Second)
		if err != nil {
			t.Fatalf("found %v: %v", found, err)
		}
		var ping micro.Ping
		if err := json.Unmarshal(m.Data, &ping); err != nil {
			t.Fatal(err)
		}
		found[ping.Name]++
	}
	if want := map[string]int{
		"meander-intake": 2, "meander-sampler": 2, "meander-reward": 2,
		"meander-advantage": 2,
	}; !maps.Equal(found, want) {
		t.Errorf("service discovery lists %v, want %v", found, want)
	}
}

// A run shows what it does while it lasts.
func TestMetrics_OfARun(t *testing.T) {
	t.Parallel()
	log := &logbook{}
	run := exec.Command(program(t, "meander"), "run", "--model", "synthetic", "-n", "2", "--height", "32", "--width",
		"32",
		"--reward", "external", "--deadline", "1h", "--log-level", "info", "--metrics-addr", "127.0.0.1:0", "a red fox")
	run.Dir, run.Stderr = t.TempDir(), log
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = run.Process.Kill()
		_ = run.Wait()
	}()
	addr := healthAddr(t, log)
	bustest.Until(t, "two images", func() error {
		if n := total(scrape(t, addr), "meander_sampler_images_total"); n != 2 {
			return fmt.Errorf("%v", n)
		}
		return nil
	})
}
