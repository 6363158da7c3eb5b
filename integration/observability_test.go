package integration_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
	yaml "go.yaml.in/yaml/v3"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/remotelm/remotelmtest"
	"github.com/meander-rl/meander/schemas"
)

// foreign returns the path of a program of others. The test is skipped where it is not on PATH.
func foreign(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not on PATH, so nothing was asked of it; make observability-test builds it", name)
	}
	return path
}

// Each alert says what is wrong and what to do, fires for that, and does not fire for what looks like it.
func TestObservability_Alerts(t *testing.T) {
	var alerts struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal([]byte(read(t, "deploy/alerts.yml")), &alerts); err != nil {
		t.Fatal(err)
	}
	tests := read(t, "integration/testdata/alerts_test.yml")
	for _, r := range alerts.Groups[0].Rules {
		if r.Annotations["summary"] == "" || r.Annotations["fix"] == "" {
			t.Errorf("%s: %v; must have a summary and a fix", r.Alert, r.Annotations)
		}
		for _, does := range []string{"fires", "does not fire"} {
			if !strings.Contains(tests, "name: "+r.Alert+" "+does+"\n") {
				t.Errorf("no test that %s %s", r.Alert, does)
			}
		}
	}
	promtool := foreign(t, "promtool")
	for _, args := range [][]string{
		{"check", "config", "../deploy/prometheus.yml"},
		{"test", "rules", "testdata/alerts_test.yml"},
	} {
		if out, err := exec.Command(promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, out)
		}
	}
}

// watched is a Prometheus that scrapes programs of a test.
type watched struct {
	url   string
	since time.Time
}

// watch starts a Prometheus with the configuration that is deployed, but for where the programs are and how often it
// asks.
func watch(t *testing.T, prometheus string, addresses ...string) *watched {
	t.Helper()
	var config map[string]any
	if err := yaml.Unmarshal([]byte(read(t, "deploy/prometheus.yml")), &config); err != nil {
		t.Fatal(err)
	}
	rules, err := filepath.Abs("../deploy/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	config["global"] = map[string]any{
		"scrape_interval": "500ms", "scrape_timeout": "500ms",
		"evaluation_interval": "500ms",
	}
	config["rule_files"] = []string{rules}
	job := config["scrape_configs"].([]any)[0].(map[string]any)
	delete(job, "dns_sd_configs")
	job["static_configs"] = []map[string]any{{"targets": addresses}}
	text, err := yaml.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	dir, address := t.TempDir(), harness.FreeAddress(t)
	if err := os.WriteFile(filepath.Join(dir, "prometheus.yml"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	launch(t, dir, prometheus, "--config.file=prometheus.yml", "--storage.tsdb.path=data",
		"--web.listen-address="+address)
	p := &watched{url: "http://" + address + "/api/v1/", since: time.Now()}
	bustest.Until(t, "a scrape of each program", func() error {
		var up struct{ Result []any }
		if err := p.ask("query", url.Values{"query": {"up == 1"}}, &up); err != nil {
			return err
		}
		if len(up.Result) != len(addresses) {
			return fmt.Errorf("of %d, want %d", len(up.Result), len(addresses))
		}
		return nil
	})
	return p
}

// ask reads the data of an answer.
func (p *watched) ask(path string, query url.Values, data any) error {
	resp, err := http.Get(p.url + path + "?" + query.Encode())
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	out := struct {
		Status, Error string
		Data          any
	}{Data: data}
	if err := json.Unmarshal(body, &out); err != nil {
		return fmt.Errorf("%s: %w: %s", path, err, body)
	}
	if out.Status != "success" {
		return fmt.Errorf("%s: %s", path, out.Error)
	}
	return nil
}

// shows says why a query of the board, with the values of its variables, has shown no number since the start.
func (p *watched) shows(query string, variables map[string]string) error {
	for name, value := range variables {
		query = strings.ReplaceAll(query, "$"+name, value)
	}
	var data struct {
		Result []struct{ Values [][2]any }
	}
	err := p.ask("query_range", url.Values{
		"query": {query}, "step": {"1"},
		"start": {strconv.FormatInt(p.since.Unix(), 10)}, "end": {strconv.FormatInt(time.Now().Unix()+1, 10)},
	}, &data)
	if err != nil {
		return err
	}
	for _, r := range data.Result {
		for _, v := range r.Values {
			if x, err := strconv.ParseFloat(v[1].(string), 64); err == nil && !math.IsNaN(x) && !math.IsInf(x, 0) {
				return nil
			}
		}
	}
	return fmt.Errorf("%s shows nothing", query)
}

// startTwoLanes starts four programs and a second sampler, which has two servers draw its tokens, one of them away. A
// reward function is away, too. It returns where the metrics are, and the server's address.
func startTwoLanes(t *testing.T) (addresses []string, server string) {
	t.Helper()
	dir, server := t.TempDir(), natsServer(t)
	engine := remotelmtest.New(t, remotelmtest.LogProbs).Engine() + ",http://127.0.0.1:1"
	scorers := filepath.Join(dir, "scorers.yaml")
	if err := os.WriteFile(scorers, []byte("http: {judge: {url: 'http://127.0.0.1:1/score', retries: 0}}\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	for _, p := range [][]string{
		{"intake", "--gc-every", "100ms", "--gc-age", "1h"},
		{"sampler", "--model", "synthetic"},
		{"sampler", "--model", sums(t), "--engine", engine},
		{"reward", "--scorers", scorers},
		{"advantage"},
	} {
		args := append([]string{"--nats-url", server, "--health-addr", "127.0.0.1:0", "--log-format", "json"}, p[1:]...)
		addresses = append(addresses, healthAddr(t, launch(t, dir, program(t, "meander-"+p[0]), args...).log))
	}
	return addresses, server
}

// keepBusy makes groups of images and of texts in one run, has the reward function that is away asked, and each stage
// refuse something.
func keepBusy(t *testing.T, server string) {
	t.Helper()
	b, err := bus.Connect(t.Context(), bus.Config{URL: server, Name: "test"}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.Ready(limited(t)); err != nil {
		t.Fatal(err)
	}
	c := client.New(b)
	text, image, unscored := small("text"), small("image"), small("unscored", schemas.RewardSpec{Name: "http:judge"})
	text.Model, image.Model, unscored.Model = "sums", "synthetic", "synthetic"
	text.Prompt, text.ImageSettings = remotelmtest.Prompt, schemas.ImageSettings{}
	image.Batch = &schemas.BatchSpec{ID: "b", Groups: 1, Step: new(int64(1))}
	for _, prompt := range []*schemas.Prompt{text, image, unscored} {
		if _, err := c.Publish(t.Context(), "r", prompt); err != nil {
			t.Fatal(err)
		}
	}
	advantages(t, c, "r", 2)
	for _, subject := range []string{
		schemas.PromptSubject("r"), schemas.RequestSubject("r", "synthetic", "x", 0, schemas.StageMain),
		schemas.TrajectorySubject("r", "x", 0, schemas.StageMain),
		schemas.RewardSubject("r", "b", "x", 0),
	} {
		if _, err := b.JetStream().Publish(t.Context(), subject, []byte("no event")); err != nil {
			t.Fatal(err)
		}
	}
}

// Every query of the board shows numbers of a run with images and texts in a real Prometheus, its variables know the
// lanes, and the alerts are evaluated on the metrics as the programs have them.
func TestObservability_Board(t *testing.T) {
	prometheus := foreign(t, "prometheus")
	skipShort(t)
	addresses, server := startTwoLanes(t)
	p := watch(t, prometheus, addresses...)
	keepBusy(t, server) // seen from before: a rate is of what changes
	var board struct {
		Templating struct {
			List []struct{ Name, Definition string }
		}
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal([]byte(read(t, "deploy/grafana/meander.json")), &board); err != nil {
		t.Fatal(err)
	}
	all := map[string]string{"__rate_interval": "30s", "lane": ".*", "model": ".*"}
	queries := 0
	for _, panel := range board.Panels {
		for _, target := range panel.Targets {
			if target.Expr == "" { // traces
				continue
			}
			queries++
			t.Run(panel.Title, func(t *testing.T) {
				bustest.Until(t, target.Expr, func() error { return p.shows(target.Expr, all) })
			})
		}
	}
	if queries < 50 {
		t.Errorf("%d queries were asked", queries)
	}
	definition := regexp.MustCompile(`^label_values\((.*), (\w+)\)$`)
	for _, v := range board.Templating.List {
		m := definition.FindStringSubmatch(v.Definition)
		if m == nil {
			continue
		}
		var values []string
		if err := p.ask("label/"+m[2]+"/values", url.Values{"match[]": {strings.ReplaceAll(m[1], "$lane", ".*")}},
			&values); err != nil {
			t.Error(err)
		}
		if !slices.Equal(values, []string{"sums", "synthetic"}) {
			t.Errorf("the variable %s has the values %v; want those of both samplers", v.Name, values)
		}
	}
	t.Run("alerts", func(t *testing.T) { checkAlerts(t, p) })
}

// checkAlerts waits until Prometheus has evaluated each alert, and those alerts are active whose reasons keepBusy
// makes.
func checkAlerts(t *testing.T, p *watched) {
	want := []string{"MeanderBreakerOpen", "MeanderDeadLetters", "MeanderEngineServerLost"}
	bustest.Until(t, fmt.Sprint(want), func() error {
		var rules struct {
			Groups []struct {
				Rules []struct{ Name, State, Health, LastError string }
			}
		}
		if err := p.ask("rules", nil, &rules); err != nil {
			return err
		}
		if len(rules.Groups) == 0 {
			return errors.New("no rules")
		}
		active := map[string]bool{}
		for _, r := range rules.Groups[0].Rules {
			if r.Health != "ok" {
				return fmt.Errorf("%s: %s %s", r.Name, r.Health, r.LastError)
			}
			if r.State != "inactive" {
				active[r.Name] = true
			}
		}
		if got := slices.Sorted(maps.Keys(active)); !slices.Equal(got, want) {
			return fmt.Errorf("active are %v", got)
		}
		return nil
	})
}

// span is a span as collectors and Jaeger write it.
type span struct {
	TraceID      string `json:"traceId"`
	SpanID       string `json:"spanId"`
	ParentSpanID string `json:"parentSpanId"`
	Name         string `json:"name"`
	Events       []any  `json:"events"`
}

// otlpTraces is OTLP in JSON.
type otlpTraces struct {
	ResourceSpans []struct {
		Resource struct {
			Attributes []struct {
				Key   string
				Value struct{ StringValue string }
			}
		}
		ScopeSpans []struct{ Spans []span }
	}
}

// tree says what keeps spans from being the one tree of tracedRun.
func (all otlpTraces) tree() error {
	stages, spans := map[string]bool{}, map[string]span{}
	for _, of := range all.ResourceSpans {
		service := ""
		for _, a := range of.Resource.Attributes {
			if a.Key == "service.name" {
				service = a.Value.StringValue
			}
		}
		for _, scope := range of.ScopeSpans {
			for _, s := range scope.Spans {
				stages[service+" "+s.Name] = true
				spans[s.SpanID] = s
			}
		}
	}
	if got := slices.Sorted(maps.Keys(stages)); !slices.Equal(got, tracedStages) || len(spans) != 27 {
		return fmt.Errorf("%d spans of %v; want 27 of %v", len(spans), got, tracedStages)
	}
	steps, roots := 0, 0
	for _, s := range spans {
		if s.Name == "denoise" {
			steps += len(s.Events)
		}
		if s.TraceID != clientTrace {
			return fmt.Errorf("span %s is of trace %s", s.Name, s.TraceID)
		}
		if s.ParentSpanID == clientSpan {
			roots++
		} else if _, there := spans[s.ParentSpanID]; !there {
			return fmt.Errorf("span %s is below %s, which is not there", s.Name, s.ParentSpanID)
		}
	}
	if roots != 1 || steps != 12 {
		return fmt.Errorf("%d spans below the client's and %d steps; want 1 and 12", roots, steps)
	}
	return nil
}

// collect starts a collector or Jaeger, which take the same configuration, and waits until it accepts connections. It
// returns where it takes OTLP over HTTP, which is OTLP in the configuration.
func collect(t *testing.T, name, dir, config string) (endpoint string) {
	t.Helper()
	path, address := foreign(t, name), harness.FreeAddress(t)
	config = strings.ReplaceAll(config, "OTLP", address)
	if err := os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	launch(t, dir, path, "--config", name+".yaml")
	bustest.Until(t, name, func() error {
		c, err := net.Dial("tcp", address)
		if err == nil {
			err = c.Close()
		}
		return err
	})
	return "http://" + address
}

const collectorConfig = `
receivers: {otlp: {protocols: {http: {endpoint: "OTLP"}}}}
exporters: {file: {path: traces.json}}
service:
  telemetry: {metrics: {level: none}}
  pipelines: {traces: {receivers: [otlp], exporters: [file]}}
`

const jaegerConfig = `
receivers: {otlp: {protocols: {http: {endpoint: "OTLP"}}}}
exporters: {jaeger_storage_exporter: {trace_storage: store}}
extensions:
  jaeger_storage: {backends: {store: {memory: {max_traces: 100}}}}
  jaeger_query: {storage: {traces: store}, http: {endpoint: "PAGE"}, grpc: {endpoint: "RPC"}}
service:
  extensions: [jaeger_storage, jaeger_query]
  telemetry: {metrics: {level: none}}
  pipelines: {traces: {receivers: [otlp], exporters: [jaeger_storage_exporter]}}
`

// The trace of a prompt that four programs worked on is one tree in a real collector, which writes it to a file, and in
// a real Jaeger.
func TestObservability_Traces(t *testing.T) {
	if _, err := exec.LookPath("jaeger"); err != nil {
		foreign(t, "otelcol") // one of both is enough to go on
	}
	skipShort(t)
	w, dir := tracedRun(t)
	export := func(t *testing.T, endpoint string) {
		t.Helper()
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
		meander(t, dir, "trace", "r", "--once", "--nats", w.Server.ClientURL()).must(t, 0)
	}
	t.Run("collector", func(t *testing.T) {
		export(t, collect(t, "otelcol", dir, collectorConfig))
		bustest.Until(t, "the file of the collector", func() error {
			f, err := os.Open(filepath.Join(dir, "traces.json"))
			if err != nil {
				return err
			}
			defer f.Close()
			var all otlpTraces
			for d := json.NewDecoder(f); ; {
				var some otlpTraces
				if err := d.Decode(&some); err == io.EOF {
					return all.tree()
				} else if err != nil {
					return err
				}
				all.ResourceSpans = append(all.ResourceSpans, some.ResourceSpans...)
			}
		})
	})
	t.Run("Jaeger", func(t *testing.T) {
		page := harness.FreeAddress(t)
		export(t, collect(t, "jaeger", dir, strings.NewReplacer("PAGE", page, "RPC",
			harness.FreeAddress(t)).Replace(jaegerConfig)))
		bustest.Until(t, "the trace in Jaeger", func() error {
			resp, err := http.Get("http://" + page + "/api/v3/traces/" + clientTrace)
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			var out struct{ Result otlpTraces }
			if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
				return err
			}
			return out.Result.tree()
		})
	})
}
