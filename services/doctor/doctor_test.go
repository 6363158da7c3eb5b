package doctor_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nats.go/micro"

	"github.com/meander-rl/meander/pkg/auth"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/doctor"
	"github.com/meander-rl/meander/services/internal/boot"
)

const signs = "../../deploy/models/signs"

// look is what is found, by area.
func look(t *testing.T, o doctor.Options) map[string][]doctor.Finding {
	t.Helper()
	found := map[string][]doctor.Finding{}
	doctor.Run(t.Context(), o, func(f doctor.Finding) {
		if f.Area == "" || f.Says == "" || f.State != doctor.OK && f.Fix == "" && f.State != doctor.Unchecked ||
			strings.Contains(f.Says+f.Fix, "\n") {
			t.Errorf("%+v", f)
		}
		found[f.Area] = append(found[f.Area], f)
	})
	return found
}

// has fails unless an area has a finding of a state that says so.
func has(t *testing.T, found map[string][]doctor.Finding, area string, state doctor.State, says string) {
	t.Helper()
	if err := lacks(found, area, state, says); err != nil {
		t.Error(err)
	}
}

// lacks says that there is no such finding.
func lacks(found map[string][]doctor.Finding, area string, state doctor.State, says string) error {
	for _, f := range found[area] {
		if f.State == state && strings.Contains(f.Says+" -> "+f.Fix, says) {
			return nil
		}
	}
	return fmt.Errorf("%s: no %s that says %q among %+v", area, state, says, found[area])
}

// unless is an error where something is wrong.
func unless(wrong bool, format string, args ...any) error {
	if wrong {
		return fmt.Errorf(format, args...)
	}
	return nil
}

// only fails for findings of other states.
func only(t *testing.T, found map[string][]doctor.Finding, area string, state doctor.State) {
	t.Helper()
	for _, f := range found[area] {
		if f.State != state {
			t.Errorf("%s: %+v; must be %s", area, f, state)
		}
	}
	if len(found[area]) == 0 {
		t.Errorf("%s: nothing", area)
	}
}

// serve announces the services of a version, as their programs do.
func serve(t *testing.T, p *bustest.Plane, version string, names ...string) {
	t.Helper()
	for _, name := range names {
		s, err := micro.AddService(p.Conn(), micro.Config{
			Name: "meander-" + name, Version: "0.0.0",
			Metadata: map[string]string{"instance": name + "-1", "version": version},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := boot.TellTime(p.Conn(), name, name+"-1"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Stop() })
	}
}

// work makes the durables that services take their work from, but for those that are spoilt.
func work(t *testing.T, p *bustest.Plane, spoil map[string]func(*jetstream.ConsumerConfig) bool) {
	t.Helper()
	for _, d := range schemas.Durables() {
		c := jetstream.ConsumerConfig{
			Durable: d.Name, AckPolicy: jetstream.AckExplicitPolicy, FilterSubjects: d.Filters,
		}
		if change := spoil[d.Name]; d.Stream == schemas.StreamAdvisories || change != nil && !change(&c) {
			continue
		}
		if _, err := p.JetStream().CreateConsumer(t.Context(), d.Stream, c); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRun_Healthy(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	serve(t, p, "v1", "intake", "sampler", "reward", "advantage")
	work(t, p, nil)
	for _, of := range []map[string]string{nil, {"client": "python", "version": "v0"}} { // workers in Python
		c := micro.Config{Name: "meander-scorer", Version: "1.0.0", Metadata: of}
		if _, err := micro.AddService(p.Conn(), c); err != nil {
			t.Fatal(err)
		}
	}
	found := look(t, doctor.Options{
		Bus: p.Bus, Where: "here", Model: signs, Device: "cpu", Version: "v1",
		DiskFree: func() (int64, error) { return 1 << 50, nil },
	})
	found["server"] = slices.DeleteFunc(found["server"], func(f doctor.Finding) bool {
		return strings.HasPrefix(f.Says, "a round trip takes ") // it measures the machine, which may be busy
	})
	for _, area := range []string{
		"server", "streams", "permissions", "limits", "clocks", "services", "counts",
		"consumers", "disk", "model", "device",
	} {
		only(t, found, area, doctor.OK)
	}
	has(t, found, "consumers", doctor.OK, "20 consumers, none of them behind without a worker")
	for _, name := range []string{"intake", "sampler", "reward", "advantage"} {
		has(t, found, "clocks", doctor.OK, name+" "+name+"-1: within")
	}
	has(t, found, "model", doctor.OK, "signs loads, weights ")
	has(t, found, "services", doctor.OK, "1 intake, 1 sampler, 1 reward, 1 advantage")
	// Each function is tried on what it rates, texts or images; ocr may not be installed here.
	has(t, found, "rewards", doctor.OK, "give a score: confidence, entropy_mean, exact_match, glyph, "+
		"jpeg_compressibility")
	for _, f := range found["rewards"] {
		if f.State != doctor.OK && !strings.HasPrefix(f.Says, "ocr: ") {
			t.Errorf("%+v", f)
		}
	}
}

func TestRun_NoServer(t *testing.T) {
	t.Parallel()
	found := look(t, doctor.Options{NoServer: fmt.Errorf("connection refused"), Device: "cuda:7"})
	has(t, found, "server", doctor.Fault, "connection refused -> start it ('meander up'")
	has(t, found, "device", doctor.Fault, "cuda:7")
	for area, f := range found {
		for _, f := range f {
			if strings.Contains(area, "streams") && (f.State != doctor.Unchecked ||
				!strings.Contains(f.Area, "clocks")) {
				t.Errorf("%+v", f)
			}
		}
	}
	has(t, look(t, doctor.Options{NoServer: fmt.Errorf("nothing in it"), Empty: true}), "server", doctor.Unchecked,
		"nothing in it")
}

// A certificate that has ended is a fault, whether the server is reached or not; one that ends soon is a warning.
func TestRun_Certificate(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	now := time.Now()
	ends := func(at time.Time) map[string][]doctor.Finding {
		return look(t, doctor.Options{Bus: p.Bus, Where: "here", Certificate: &x509.Certificate{NotAfter: at}})
	}
	has(t, ends(now.Add(-time.Hour)), "server", doctor.Fault,
		"expired at "+now.Add(-time.Hour).UTC().Format(time.RFC3339))
	has(t, ends(now.Add(-time.Hour)), "server", doctor.Fault, "meander auth update DIR")
	has(t, ends(now.Add(24*time.Hour)), "server", doctor.Warning,
		"expires at "+now.Add(24*time.Hour).UTC().Format(time.RFC3339))
	if err := lacks(ends(now.Add(100*24*time.Hour)), "server", doctor.Warning, "expires"); err == nil {
		t.Error("a certificate of 100 days: a warning")
	}
	for want, cause := range map[string]error{
		"make a new certificate ('meander auth update DIR'": x509.CertificateInvalidError{Cert: &x509.Certificate{}, Reason: x509.Expired},
		"the server runs, but this program does not trust":  x509.UnknownAuthorityError{},
	} {
		refused := fmt.Errorf("connect: %w", &tls.CertificateVerificationError{Err: cause})
		has(t, look(t, doctor.Options{NoServer: refused}), "server", doctor.Fault, " -> "+want)
	}
}

// Streams that are missing, another's, of another version, full, nearly full.
func TestRun_Streams(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	js := p.JetStream()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(js.DeleteStream(t.Context(), schemas.StreamVerdicts))
	must(js.DeleteStream(t.Context(), schemas.StreamSealBucket))
	must(js.DeleteStream(t.Context(), schemas.StreamRewards))
	_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{
		Name: schemas.StreamRewards, Subjects: []string{"mdr.v1.reward.>"}, Storage: jetstream.MemoryStorage,
	})
	must(err)
	p.Change(t, schemas.StreamTrajectories, func(c *jetstream.StreamConfig) { c.AllowDirect = false })
	must(p.SetLimits(t.Context(), bus.StreamLimit{Stream: schemas.StreamParked, MaxBytes: 1 << 20},
		bus.StreamLimit{Stream: schemas.StreamDead, MaxBytes: 1 << 20}))
	fill := func(subject string, bytes int) {
		for i := range bytes / 4096 {
			_, err := p.Conn().Request(fmt.Sprintf(subject, i), make([]byte, 4096), time.Minute)
			must(err)
		}
	}
	fill("mdr.v1.parked.r.lane.u%d.0.main", 850<<10)
	fill("mdr.v1.dead.intake.r.u%d", 2<<20)
	found := look(t, doctor.Options{Bus: p.Bus})
	has(t, found, "streams", doctor.Fault, "2 streams not there: MDR_VERDICTS, KV_mdr-seal -> start 'meander up'")
	has(t, found, "streams", doctor.Fault, "MDR_REWARDS is not the stream of this contract: storage is Memory, must "+
		"be File")
	has(t, found, "streams", doctor.Warning, "MDR_TRAJECTORIES is of another version: it answers no direct gets")
	has(t, found, "streams", doctor.Warning, "MDR_PARKED is nearly full: 8")
	has(t, found, "streams", doctor.OK, " streams as this version expects")
	for _, f := range found["streams"] {
		if strings.Contains(f.Says, "MDR_DEAD") {
			t.Errorf("a stream that rolls: %+v", f)
		}
	}
	fill("mdr.v1.parked.s.lane.u%d.0.main", 200<<10)
	has(t, look(t, doctor.Options{Bus: p.Bus}), "streams", doctor.Fault, "MDR_PARKED is full")
}

// What waits and no one takes is said, and not what somebody works on.
func TestRun_Consumers(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	idle := jetstream.ConsumerConfig{Durable: schemas.PromptsDurable().Name, AckPolicy: jetstream.AckExplicitPolicy}
	if _, err := p.JetStream().CreateConsumer(t.Context(), schemas.StreamPrompts, idle); err != nil {
		t.Fatal(err)
	}
	if _, err := p.PublishPrompt(t.Context(), "r", []byte("x"), nil); err != nil {
		t.Fatal(err)
	}
	has(t, look(t, doctor.Options{Bus: p.Bus}), "consumers", doctor.Fault,
		"intake of MDR_PROMPTS: 1 wait, and no worker takes them")
	has(t, look(t, doctor.Options{Bus: p.Bus}), "services", doctor.Warning,
		"no service answers for intake, sampler, reward, advantage")
}

// Messages for a service that never ran wait, although no consumer is behind.
func TestRun_NeverRan(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	if _, err := p.PublishPrompt(t.Context(), "r", []byte("x"), nil); err != nil {
		t.Fatal(err)
	}
	has(t, look(t, doctor.Options{Bus: p.Bus}), "consumers", doctor.Fault,
		"1 messages wait for the intake service, and none runs")
}

// Durables that somebody replaced or removed, under the services that need them.
func TestRun_Durables(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	has(t, look(t, doctor.Options{Bus: p.Bus}), "consumers", doctor.Unchecked, "services make them")
	serve(t, p, "v1", "intake", "reward", "advantage")
	work(t, p, map[string]func(*jetstream.ConsumerConfig) bool{
		schemas.PromptsDurable().Name: func(c *jetstream.ConsumerConfig) bool {
			c.FilterSubject = "mdr.v1.prompt.other"
			return true
		},
		schemas.RewardsDurable(3).Name: func(*jetstream.ConsumerConfig) bool { return false },
		schemas.TrajectoriesDurable().Name: func(c *jetstream.ConsumerConfig) bool {
			c.AckPolicy = jetstream.AckNonePolicy
			return true
		},
	})
	e := &schemas.Presence{Service: schemas.ServiceSampler, Instance: "s", Lane: "signs", At: time.Now().UnixNano()}
	p.Forge(t, schemas.PresenceSubject("s"), bustest.Encode(t, e))
	found := look(t, doctor.Options{Bus: p.Bus})
	has(t, found, "consumers", doctor.Fault, "intake of MDR_PROMPTS is not as intake makes it: it takes "+
		"mdr.v1.prompt.other")
	has(t, found, "consumers", doctor.Fault, "advantage-p03 of MDR_REWARDS is not there, and advantage runs")
	has(t, found, "consumers", doctor.Fault, "reward of MDR_TRAJECTORIES is not as reward makes it")
	has(t, found, "consumers", doctor.Fault, "sampler-signs of MDR_REQUESTS is not there")
	if n := len(found["consumers"]); n != 4 {
		t.Errorf("%d findings: %+v", n, found["consumers"])
	}
}

// What waits at a durable whose worker asks for it, and gets nothing.
func TestRun_Backlog(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	c, err := p.JetStream().CreateConsumer(t.Context(), schemas.StreamPrompts, jetstream.ConsumerConfig{
		Durable: schemas.PromptsDurable().Name, AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := p.PublishPrompt(t.Context(), "r", []byte("x"), nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Next(); err != nil { // in hand, and no one goes on
		t.Fatal(err)
	}
	later := func(d time.Duration) func() time.Time { return func() time.Time { return time.Now().Add(d) } }
	found := look(t, doctor.Options{Bus: p.Bus, Now: later(time.Minute)})
	has(t, found, "consumers", doctor.OK, "none of them behind")
	found = look(t, doctor.Options{Bus: p.Bus, Now: later(time.Hour)})
	has(t, found, "consumers", doctor.Warning, "intake of MDR_PROMPTS: 1 wait, and none was handed out for 1h")
}

// Weights that a sampler refused, and that another has not taken.
func TestRun_Policies(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	has(t, look(t, doctor.Options{Bus: p.Bus}), "policies", doctor.Unchecked, "there are none yet")
	digest := strings.Repeat("a", 64)
	policy := schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   "signs", Model: "signs", Family: "qwen-image", WeightsDigest: digest, Height: 64, Width: 64, NumInferenceSteps: 1,
		TrueCFGScale: 1, LatentChannels: 64, PixelsPerToken: 16, MaxPixels: 1 << 20,
	}
	if err := p.SetPolicy(t.Context(), &policy, nil); err != nil {
		t.Fatal(err)
	}
	has(t, look(t, doctor.Options{Bus: p.Bus}), "policies", doctor.OK, "lane signs: version 0, and no sampler runs")
	next := policy
	next.PolicyVersion, next.WeightsDigest = 1, strings.Repeat("b", 64)
	if err := p.SetPolicy(t.Context(), &next, &policy); err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"current", "behind", "refuses"} {
		version := []int64{1, 0, 0}[i]
		e := &schemas.Presence{
			Service: schemas.ServiceSampler, Instance: name, Lane: "signs", PolicyVersion: &version, At: 1,
		}
		p.Forge(t, schemas.PresenceSubject(name), bustest.Encode(t, e))
	}
	for i, state := range []string{schemas.AppliedRefused, schemas.AppliedApplied} {
		a := &schemas.Applied{
			Tenant: schemas.TenantMain,
			Lane:   "signs", Instance: "refuses", PolicyVersion: int64(1 - i), State: state, WeightsDigest: digest, Backend: "cpu", At: 1,
		}
		if state == schemas.AppliedRefused {
			a.Error = "lora_A of another rank\nand more"
		}
		_, err := p.JetStream().Publish(t.Context(), schemas.AppliedSubject("signs", schemas.TenantMain, "refuses"),
			bustest.Encode(t, a))
		if err != nil {
			t.Fatal(err)
		}
	}
	found := look(t, doctor.Options{Bus: p.Bus})
	has(t, found, "policies", doctor.Warning, "behind uses version 0 of lane signs, and the current one is 1")
	has(t, found, "policies", doctor.Fault, "refuses refused version 1 of lane signs and goes on with 0: lora_A of "+
		"another rank ->")
	if n := len(found["policies"]); n != 2 {
		t.Errorf("%d findings: %+v", n, found["policies"])
	}
}

// Clocks that are apart: that of this machine, and those of services.
func TestRun_Clocks(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	_, err := p.Conn().Subscribe(auth.ClockSubject, func(m *nats.Msg) {
		for _, service := range []string{"intake", "reward"} { // who has entries is not asked
			at := time.Now().Add(-time.Minute).UnixNano()
			_ = m.Respond(fmt.Appendf(nil, `{"service":%q,"instance":"a","at":%d}`, service, at)) // else it is asked again
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	// What it takes to reach the server is taken for a difference of clocks: on a busy machine it is looked at again.
	bustest.Until(t, "each clock as far off as it is", func() error {
		for name, behind := range map[string]time.Duration{
			"reward-a": time.Minute, "reward-b": -5 * time.Second,
			"reward-c": 0,
		} {
			e := &schemas.Presence{
				Service: schemas.ServiceReward, Instance: name, At: time.Now().Add(-behind).UnixNano(),
			}
			// Without a message id, unlike Forge: the next look must not find this one's times.
			if _, err := p.JetStream().Publish(t.Context(), schemas.PresenceSubject(name),
				bustest.Encode(t, e)); err != nil {
				t.Fatal(err)
			}
		}
		found := look(t, doctor.Options{Bus: p.Bus, Now: func() time.Time { return time.Now().Add(time.Hour) }})
		return errors.Join(
			lacks(found, "clocks", doctor.Fault, "intake a: its clock is 1m0s behind the server's"),
			lacks(found, "clocks", doctor.Fault, "this machine: its clock is 1h0m0s ahead of the server's -> set "+
				"that clock by NTP"),
			lacks(found, "clocks", doctor.Fault, "reward-a: its clock is 1m0s behind the server's"),
			lacks(found, "clocks", doctor.Warning, "reward-b: its clock is 5s ahead of"),
			lacks(found, "clocks", doctor.OK, "reward-c: within"),
			unless(len(found["clocks"]) != 5, "%+v", found["clocks"]),
		)
	})
}

func TestRun_Versions(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	serve(t, p, "v1", "intake", "sampler", "reward")
	serve(t, p, "v2", "advantage")
	found := look(t, doctor.Options{Bus: p.Bus, Version: "v1"})
	has(t, found, "services", doctor.Warning, "versions differ: this program is v1; v1: ")
	has(t, found, "services", doctor.Warning, "v2: advantage advantage-1")
}

// A folder without a file, and one whose weights were cut off.
func TestRun_Model(t *testing.T) {
	t.Parallel()
	broken := func(spoil func(weights string) error) map[string][]doctor.Finding {
		dir := filepath.Join(t.TempDir(), "copy")
		if err := os.CopyFS(dir, os.DirFS(signs)); err != nil {
			t.Fatal(err)
		}
		weights, err := filepath.Glob(filepath.Join(dir, "*", "*.safetensors"))
		if err != nil || len(weights) == 0 {
			t.Fatal(weights, err)
		}
		if err := spoil(weights[0]); err != nil {
			t.Fatal(err)
		}
		return look(t, doctor.Options{NoServer: fmt.Errorf("none"), Model: dir, Device: "cpu"})
	}
	has(t, broken(os.Remove), "model", doctor.Fault, "copy the folder again, with all its files")
	has(t, broken(func(path string) error { return os.Truncate(path, 4096) }), "model", doctor.Fault,
		"copy the folder again")
	has(t, look(t, doctor.Options{NoServer: fmt.Errorf("none"), Model: "nowhere"}), "model", doctor.Fault, "nowhere")

	p := bustest.New(t)
	if err := p.SetPolicy(t.Context(), &schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   "signs", Model: "signs", Family: "qwen-image", WeightsDigest: strings.Repeat("a", 64), Height: 64, Width: 64, NumInferenceSteps: 1, TrueCFGScale: 1, LatentChannels: 64, PixelsPerToken: 16, MaxPixels: 1 << 20,
	}, nil); err != nil {
		t.Fatal(err)
	}
	has(t, look(t, doctor.Options{Bus: p.Bus, Model: signs, Device: "cpu"}), "model", doctor.Warning,
		"lane signs was last served with another checkpoint, aaaaaaaaaaaa")
}

// Reward functions whose server is not there, answers nothing, or has no worker.
func TestRun_Rewards(t *testing.T) {
	t.Parallel()
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	file := filepath.Join(t.TempDir(), "scorers.yaml")
	text := fmt.Sprintf("http:\n  gone:\n    url: %s\n  silent:\n    url: http://%s\nnats:\n  nobody: {}\n", gone.URL,
		silent.Addr())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := bustest.New(t)
	found := look(t, doctor.Options{Bus: p.Bus, Scorers: file, Timeout: time.Second})
	has(t, found, "rewards", doctor.Fault, "http:gone gives no score: ")
	has(t, found, "rewards", doctor.Fault, "http:silent gives no score: ")
	has(t, found, "rewards", doctor.Fault, "nats:nobody gives no score: ")
	// What this program computes itself has the time that it takes, however long one waits for others.
	local := look(t, doctor.Options{Bus: p.Bus, Model: signs, Timeout: time.Hour})
	has(t, local, "rewards", doctor.OK, "jpeg_compressibility")
	has(t, look(t, doctor.Options{NoServer: fmt.Errorf("none"), Scorers: file + "x"}), "rewards", doctor.Fault,
		"correct the file of --scorers")
}

func TestRun_Disk(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	for free, want := range map[int64]doctor.State{1 << 20: doctor.Fault, 1 << 30: doctor.Warning, 1 << 50: doctor.OK} {
		found := look(t, doctor.Options{Bus: p.Bus, DiskFree: func() (int64, error) { return free, nil }})
		only(t, found, "disk", want)
	}
	has(t, look(t, doctor.Options{Bus: p.Bus}), "disk", doctor.Unchecked, "cannot be seen from here")
}

// A check that hangs is given up, and the others are not kept by it.
func TestRun_NeverHangs(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	forever := make(chan struct{})
	defer close(forever)
	timeout := time.Second
	bustest.Until(t, "the others in time", func() error { // which may take a busy machine longer
		timeout *= 2
		found := look(t, doctor.Options{Bus: p.Bus, Timeout: timeout, DiskFree: func() (int64, error) {
			<-forever
			return 0, nil
		}})
		has(t, found, "disk", doctor.Fault, fmt.Sprintf("no answer within %v", timeout))
		return lacks(found, "streams", doctor.OK, "as this version expects")
	})
}

// A server that does not tell the time is one fault, in one sentence.
func TestRun_NoClock(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	if err := p.JetStream().DeleteStream(t.Context(), schemas.StreamPresenceBucket); err != nil {
		t.Fatal(err)
	}
	found := look(t, doctor.Options{Bus: p.Bus})
	clocks := found["clocks"]
	if len(clocks) != 1 || clocks[0].State == doctor.OK || strings.Contains(clocks[0].Says, "it did not say the time") {
		t.Errorf("%+v; want the error of the server alone", clocks)
	}
}
