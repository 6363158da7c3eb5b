package integration_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/template"
	"time"

	"github.com/nats-io/nats.go"
	yaml "go.yaml.in/yaml/v3"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

// described is a channel of the AsyncAPI document as a generator of subscribers needs it.
type described struct {
	Name, Filter string
	// Mode is live for a core subscription, stream for what a stream has stored, bucket for entries of a key-value
	// bucket.
	Mode, Store string
	// Schema is the path of the payload's JSON Schema; empty for raw bytes.
	Schema string
}

// replySubjects are where this test wants the answers to a prompt and to a control.
var replySubjects = map[string]string{
	"receipt": "_INBOX.asyncapi.receipt", "control_receipt": "_INBOX.asyncapi.control",
}

// workersAnswers go to the inbox of the service that asked, where no one else may read.
var workersAnswers = []string{"score_reply", "interact_reply", "teacher_reply", "seen_reply"}

// describedChannels reads the channels of the document, and nothing else of this project.
func describedChannels(t *testing.T, document string) []described {
	t.Helper()
	var doc struct {
		Channels map[string]struct {
			Address  *string
			Messages map[string]struct {
				Ref string `yaml:"$ref"`
			}
			Kept struct{ Stream, Bucket string } `yaml:"x-jetstream"`
		}
		Components struct {
			Messages map[string]struct {
				Payload struct {
					Schema struct {
						Ref string `yaml:"$ref"`
					}
				}
			}
		}
		Streams map[string]struct{ Retention string } `yaml:"x-jetstream-streams"`
	}
	if err := yaml.Unmarshal([]byte(read(t, document)), &doc); err != nil {
		t.Fatal(err)
	}
	parameter := regexp.MustCompile(`\{[a-z]+\}`)
	var out []described
	for _, name := range slices.Sorted(maps.Keys(doc.Channels)) {
		c := doc.Channels[name]
		d := described{Name: name, Mode: "live", Filter: replySubjects[name]}
		if c.Address != nil {
			d.Filter = parameter.ReplaceAllString(*c.Address, "*")
		}
		switch {
		case d.Filter == "" && slices.Contains(workersAnswers, name):
			continue
		case c.Kept.Bucket != "":
			d.Mode, d.Store, d.Filter = "bucket", c.Kept.Bucket, strings.TrimPrefix(d.Filter, "$KV."+c.Kept.Bucket+".")
		case c.Kept.Stream != "" && doc.Streams[c.Kept.Stream].Retention == "limits":
			d.Mode, d.Store = "stream", c.Kept.Stream
		}
		if d.Filter == "" {
			t.Errorf("channel %s has no address, and nothing here says where its messages go", name)
		}
		for _, m := range c.Messages {
			message := doc.Components.Messages[strings.TrimPrefix(m.Ref, "#/components/messages/")]
			if ref := message.Payload.Schema.Ref; ref != "" {
				path, err := filepath.Abs(filepath.Join(root, filepath.Dir(document), ref))
				if err != nil {
					t.Fatal(err)
				}
				d.Schema = path
			}
		}
		out = append(out, d)
	}
	return out
}

// subscriber is a program that was generated from the document, while it runs.
type subscriber struct {
	out *bufio.Reader
	in  io.WriteCloser
	cmd *exec.Cmd
	err bytes.Buffer
}

// generateSubscriber writes a subscriber of the channels by a template and starts it. It listens when this returns.
func generateSubscriber(
	t *testing.T, name, document string, channels []described, env []string, command ...string,
) *subscriber {
	t.Helper()
	source, err := template.ParseFiles(filepath.Join("testdata/asyncapi", name+".tmpl"))
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(filepath.Join(t.TempDir(), name))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := source.Execute(file, map[string]any{"Document": document, "Channels": channels}); err != nil {
		t.Fatal(err)
	}
	s := &subscriber{cmd: exec.Command(command[0], slices.Insert(command[1:], 0, file.Name())...)}
	s.cmd.Env, s.cmd.Stderr = append(os.Environ(), env...), &s.err
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
	})
	s.out = bufio.NewReader(out)
	if line, err := s.out.ReadString('\n'); line != "ready\n" {
		t.Fatalf("%s says %q, %v\n%s", name, line, err, &s.err)
	}
	return s
}

// report has the subscriber read what is stored: how much it received on each channel.
func (s *subscriber) report(t *testing.T) (received map[string]int) {
	t.Helper()
	if _, err := io.WriteString(s.in, "read\n"); err != nil {
		t.Fatal(err)
	}
	line, err := s.out.ReadBytes('\n')
	var report map[string]struct {
		Received int
		Wrong    string
	}
	if err != nil || json.Unmarshal(line, &report) != nil {
		t.Fatalf("%q, %v\n%s", line, err, &s.err)
	}
	received = map[string]int{}
	for name, c := range report {
		received[name] = c.Received
		if c.Wrong != "" {
			t.Errorf("channel %s: the payload is not of the schema: %s", name, c.Wrong)
		}
	}
	return received
}

// The official parser finds no fault in the document, and subscribers in two languages that are generated from it alone
// receive all that a pipeline publishes and stores, on each of its channels, in the form that the schemas say.
func TestAsyncAPI(t *testing.T) {
	t.Parallel()
	const document = "schemas/asyncapi.yaml"
	channels := describedChannels(t, document)
	modules := os.Getenv("MEANDER_NODE_MODULES")
	_, node := exec.LookPath("node")
	skipNode := func(t *testing.T) {
		t.Helper()
		if node != nil || modules == "" {
			t.Skipf("Node is not tested: node: %v, MEANDER_NODE_MODULES: %q; make asyncapi-test has both", node,
				modules)
		}
	}
	t.Run("parser", func(t *testing.T) {
		skipNode(t)
		c := exec.Command("node", "testdata/asyncapi/validate.cjs", filepath.Join(root, document))
		c.Env = append(os.Environ(), "NODE_PATH="+modules)
		out, err := c.CombinedOutput()
		if t.Logf("%s", out); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	for name, start := range map[string]func(t *testing.T, url string) *subscriber{
		"node": func(t *testing.T, url string) *subscriber {
			skipNode(t)
			return generateSubscriber(t, "subscriber.cjs", document, channels, []string{"NODE_PATH=" + modules}, "node",
				url)
		},
		"python": func(t *testing.T, url string) *subscriber {
			python := pythonWith(t, "nats, msgpack, jsonschema")
			return generateSubscriber(t, "subscriber.py", document, channels, nil, python, url)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(o *natsd.Options) { o.Listen = "127.0.0.1:0" })
			s := start(t, w.Server.ClientURL())
			want := publishEverything(t, w, channels)
			got := s.report(t)
			for _, c := range channels {
				if want[c.Name] == 0 || got[c.Name] != want[c.Name] {
					t.Errorf("channel %s: %s received %d by %s, of %d", c.Name, c.Mode, got[c.Name], c.Filter,
						want[c.Name])
				}
			}
			t.Logf("received: %v", got)
		})
	}
}

// publishEverything runs a pipeline until each channel had something, and counts it by what schemas says of subjects.
func publishEverything(t *testing.T, w *world, channels []described) map[string]int {
	t.Helper()
	ctx := limited(t)
	var mu sync.Mutex
	var live []string
	seen := func(m *nats.Msg) {
		mu.Lock()
		defer mu.Unlock()
		live = append(live, m.Subject)
	}
	for _, subject := range []string{schemas.AllSubjects, replySubjects["receipt"], replySubjects["control_receipt"]} {
		if _, err := w.Conn().Subscribe(subject, seen); err != nil {
			t.Fatal(err)
		}
	}
	c := defaults()
	for _, name := range stages {
		w.Serve(t, c.run(name))
	}
	texts := c
	texts.sampler.Model = sumsFolder(t)
	w.Serve(t, texts.run("sampler"))

	// Workers of a reward function and of an interaction.
	ranks := []schemas.MemberScore{{Score: new(0.5)}, {SampleIndex: 1, Score: new(0.25)}}
	for name, reply := range map[string]*schemas.ScoreReply{"colour": {Score: new(0.5)}, "rank": {Scores: ranks}} {
		if _, err := w.Conn().QueueSubscribe(schemas.ScoreSubject(name), name, func(m *nats.Msg) {
			if err := m.Respond(bustest.Encode(t, reply)); err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	replies(t, w, "tutor", func(*schemas.InteractRequest) []byte {
		return packed(t, &schemas.InteractReply{Content: "too low"})
	})

	if _, err := w.Conn().QueueSubscribe(schemas.TeacherSubject("reference"), "reference", func(m *nats.Msg) {
		reply := &schemas.TeacherReply{Error: "it is an image", Code: schemas.CodeUnfit}
		if err := m.Respond(bustest.Encode(t, reply)); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	var refused *client.RefusedError
	asked := schemas.TeacherRequest{Name: "reference", Run: "images", UID: "g"}
	if _, err := w.client.TeacherReply(ctx, asked); !errors.As(err, &refused) {
		t.Fatal(err)
	}

	publish := func(run schemas.Run, p *schemas.Prompt) {
		t.Helper()
		p.Seed, p.GroupSize = new(int64(3)), new(int64(2))
		if _, err := w.client.Publish(ctx, run, p); err != nil {
			t.Fatal(err)
		}
	}
	publishResults(t, w, publish)
	publishJudged(t, w, publish)
	publishControls(t, w, publish)
	bustest.Until(t, "the answers to a prompt and a control", func() error {
		mu.Lock()
		defer mu.Unlock()
		for _, subject := range replySubjects {
			if !slices.Contains(live, subject) {
				return io.ErrUnexpectedEOF
			}
		}
		return nil
	})
	mu.Lock()
	defer mu.Unlock()
	return countEverything(t, w, channels, live)
}

// publishResults has every event of a sample made: of an image, of a text, of one that is refused, and a policy.
func publishResults(t *testing.T, w *world, publish func(run schemas.Run, p *schemas.Prompt)) {
	t.Helper()
	ctx := limited(t)
	side := new(int64(768)) // states of 576 KiB, in parts
	publish("images", &schemas.Prompt{
		UID:           "g",
		Routing:       schemas.Routing{Model: "synthetic"},
		Prompt:        "a red fox",
		ImageSettings: schemas.ImageSettings{Height: side, Width: side, NumInferenceSteps: new(int64(2))},
		Reward:        []schemas.RewardSpec{{Name: "synthetic"}},
	})
	images := []schemas.DataImage{{Data: paint(t, 64, 64, 60)}, {Data: paint(t, 64, 64, 90)}}
	publish("rolled", &schemas.Prompt{
		UID:     "g",
		Routing: schemas.Routing{Model: "synthetic"},
		Prompt:  "a red fox", Reward: []schemas.RewardSpec{{Name: "nats:colour"}, {Name: "nats:rank", GroupMin: 2}},
		ImageSettings: schemas.ImageSettings{
			Start: &schemas.Start{Data: &schemas.Data{Images: images}},
			ScheduledSampling: &schemas.ScheduledSampling{
				MaxStepOffset: new(int64(3)), Probability: new(1.0), Timesteps: new(int64(50)), Decode: true,
			},
		},
	})
	publish("texts", &schemas.Prompt{
		UID:     "g",
		Routing: schemas.Routing{Model: "sums"},
		Prompt:  "347+58=?", Reward: []schemas.RewardSpec{{Name: "confidence"}},
		Batch: &schemas.BatchSpec{ID: "b", Groups: 1},
		Text: &schemas.Text{
			Interaction: &schemas.Interaction{Name: "tutor", MaxTurns: new(int64(2))}, Logits: &schemas.Logits{Form: "topk"},
		},
	})
	for _, run := range []schemas.Run{"images", "rolled", "texts"} {
		if a := w.advantages(t, run, 1)["g"]; a.Status != schemas.StatusComplete {
			t.Fatalf("run %s: %+v", run, a)
		}
	}
	drawn := new(schemas.Trajectory)
	drawn.Run, drawn.UID, drawn.Lane = "images", "g", "synthetic"
	if _, err := w.client.Seen(ctx, drawn, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Bus.Publish(ctx, &schemas.Update{
		Run: "images", Lane: "synthetic", Tenant: schemas.TenantMain, Trainer: "night", Step: 1, At: 1,
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Bus.Publish(ctx, &schemas.Alarm{
		Run: "images", Rule: schemas.RuleKL, Value: 0.2, Limit: 0.1, Says: "the divergence is 0.2", At: 1,
	}); err != nil {
		t.Fatal(err)
	}
	// Logits of a vocabulary that is large enough for parts would take minutes.
	w.Forge(t, schemas.PartSubject(schemas.TokensSubject("texts", "g", 0, schemas.StageMain, "attempt", 0), 0),
		make([]byte, 64))
	_, err := w.client.Publish(ctx, "images", &schemas.Prompt{
		UID:     "refused",
		Routing: schemas.Routing{Model: "synthetic"},
		Prompt:  "a red fox", Reward: []schemas.RewardSpec{{Name: "unknown"}},
	})
	if _, ok := errors.AsType[*client.RefusedError](err); !ok {
		t.Fatalf("an unknown reward function: %v", err)
	}
	bustest.Dead(t, w.Bus, 1)
	if _, err := w.client.Try(ctx, "images", &schemas.Prompt{
		UID: "tried", Prompt: "a red fox", Routing: schemas.Routing{Model: "synthetic"},
	}); err != nil {
		t.Fatal(err)
	}

	adapter := parsedLoRA(t, loraFile(t, "model.layers.0.mlp.down_proj", 128, 384, 4, 7, 0))
	pushed, err := w.client.PushPolicy(ctx, adapter, client.Push{Lane: "sums"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.client.AwaitPolicy(ctx, pushed); err != nil {
		t.Fatal(err)
	}
}

// publishJudged has samples judged in the middle, of which one ends there.
func publishJudged(t *testing.T, w *world, publish func(run schemas.Run, p *schemas.Prompt)) {
	t.Helper()
	publish("middle", &schemas.Prompt{
		UID: "g", Routing: schemas.Routing{Model: "synthetic"}, Prompt: "a red fox", GroupSize: new(int64(2)),
		Reward: []schemas.RewardSpec{{Name: "synthetic", AtSteps: []int64{1}}},
		ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(2)), Prune: &schemas.Prune{StepIndex: 1, Keep: new(int64(1))},
		},
	})
	if a := w.advantages(t, "middle", 1)["g"]; a.Status != schemas.StatusPartial {
		t.Fatalf("one of two samples ends in the middle: %+v", a)
	}
}

// publishControls has every event of people made: verdicts, and controls with what they do.
func publishControls(t *testing.T, w *world, publish func(run schemas.Run, p *schemas.Prompt)) {
	t.Helper()
	ctx := limited(t)
	// One group is judged, and one that waits for it is cancelled; the run is paused before anything of a third is
	// made.
	waits := func() *schemas.Prompt {
		return &schemas.Prompt{
			Routing: schemas.Routing{Model: "synthetic"}, Prompt: "a red fox",
			Reward: []schemas.RewardSpec{{Name: "external"}},
		}
	}
	for _, uid := range []schemas.UID{"judged", "cancelled"} {
		p := waits()
		p.UID = uid
		publish("people", p)
	}
	for sample := range int64(2) {
		v := &schemas.Verdict{
			Run: "people", UID: "judged", SampleIndex: sample, Name: "external", Value: new(0.5), At: 1,
		}
		if err := w.client.Verdict(ctx, v); err != nil {
			t.Fatal(err)
		}
	}
	bustest.Await(t, w.Bus, 4, schemas.StreamTrajectories, schemas.TrajectoryFilter("people", "*"))
	cancel := &schemas.Control{Run: "people", UID: "cancelled", Action: "cancel", By: "ada"}
	if _, err := w.client.Control(ctx, cancel); err != nil {
		t.Fatal(err)
	}
	w.advantages(t, "people", 2)
	if _, err := w.client.Control(ctx, &schemas.Control{Run: "people", Action: "pause", By: "ada"}); err != nil {
		t.Fatal(err)
	}
	later := waits()
	later.UID, later.GroupSize = "later", new(int64(1))
	reply := nats.Header{schemas.HeaderReply: {replySubjects["receipt"]}}
	if _, err := w.Bus.PublishPrompt(ctx, "people", bustest.Encode(t, later), reply); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, w.Bus, 1, schemas.StreamParked)
	status := &schemas.Control{Run: "people", Action: "status", By: "ada", At: time.Now().UnixNano()}
	if _, err := w.Bus.Publish(ctx, status, bus.ReplyTo(replySubjects["control_receipt"])); err != nil {
		t.Fatal(err)
	}
}

// countEverything counts what each channel has had, by what schemas says of subjects.
func countEverything(t *testing.T, w *world, channels []described, live []string) map[string]int {
	t.Helper()
	want := map[string]int{}
	for _, s := range schemas.Streams() {
		for m, err := range w.Read(t.Context(), s.Name, nil, bus.ReadOptions{HeadersOnly: true}) {
			if err != nil {
				t.Fatal(err)
			}
			a, _ := schemas.ParseSubject(m.Subject)
			want[a.Kind]++
		}
	}
	for _, c := range channels {
		switch c.Mode {
		case "live":
			want[c.Name] = 0
			for _, subject := range live {
				first, _, _ := strings.Cut(schemas.MessageID(subject), ".")
				if subject == replySubjects[c.Name] || first == strings.TrimSuffix(c.Name, "_published") {
					want[c.Name]++
				}
			}
		case "bucket":
			want[c.Name] = len(bucketKeys(t, w, c.Store, strings.Count(c.Filter, ".")))
		}
	}
	return want
}

// bucketKeys are the keys of a bucket with so many dots.
func bucketKeys(t *testing.T, w *world, bucket string, dots int) []string {
	t.Helper()
	js, err := w.Conn().JetStream()
	if err != nil {
		t.Fatal(err)
	}
	kv, err := js.KeyValue(bucket)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := kv.Keys()
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(keys, func(k string) bool { return strings.Count(k, ".") != dots })
}
