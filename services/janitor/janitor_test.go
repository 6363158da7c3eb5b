package janitor_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/janitor"
)

// store puts a closed group of one sample on the plane, or with batch one of a batch.
func store(t *testing.T, p *bustest.Plane, uid schemas.UID, batch string) {
	storeGroup(t, p, uid, batch, false)
}

// storeGroup is store of a group whose steps may go once they are read.
func storeGroup(t *testing.T, p *bustest.Plane, uid schemas.UID, batch string, freeSteps bool) {
	t.Helper()
	for _, subject := range []string{
		schemas.StepSubject("r1", uid, 0, schemas.StageMain, "a", 0),
		schemas.TrajectorySubject("r1", uid, 0, schemas.StageMain), schemas.RewardSubject("r1", batch, uid, 0),
	} {
		if _, err := p.PublishRaw(t.Context(), subject, make([]byte, 1000), nil, ""); err != nil {
			t.Fatal(err)
		}
	}
	a := &schemas.Advantage{
		Run: "r1", UID: uid, Batch: batch, Status: schemas.StatusFailed, Error: "out of paint", GroupSize: 1,
		Members:   []schemas.Member{{SampleIndex: 0, Status: schemas.StatusMissing}},
		Estimator: "flow_grpo", Scale: schemas.StdNone, StdBasis: schemas.BasisSample, Opened: 1, Closed: 2,
		FreeReadSteps: freeSteps,
	}
	if _, err := p.Publish(t.Context(), a); err != nil {
		t.Fatal(err)
	}
}

// events is what is stored of a group.
func events(t *testing.T, p *bustest.Plane, uid schemas.UID) (n int) {
	t.Helper()
	for stream, filters := range schemas.GroupFilters("r1", uid, "*") {
		for _, filter := range filters {
			subjects, err := p.Subjects(t.Context(), stream, filter)
			if err != nil {
				t.Fatal(err)
			}
			n += len(subjects)
		}
	}
	return n
}

// rule frees by age, after the least grace.
func rule() janitor.Config {
	c := janitor.DefaultConfig()
	c.Grace, c.Age = minGrace, time.Millisecond
	return c
}

// minGrace is the least grace that the janitor takes.
const minGrace = time.Second

// overGrace waits until a pass would free so many groups.
func overGrace(t *testing.T, p *bustest.Plane, groups int) {
	t.Helper()
	bustest.Until(t, "the end of the grace", func() error {
		r, err := janitor.Pass(t.Context(), rule(), p.Bus, true)
		if err == nil && r.Groups != groups {
			err = fmt.Errorf("would free %+v", r)
		}
		return err
	})
}

// Closed groups go whole; open ones, those of open batches, and what has just closed stay. A
// dry run frees nothing and says what it would.
func TestPass_Closed(t *testing.T) {
	p := bustest.New(t)
	store(t, p, "u1", "u1")
	store(t, p, "u2", "b1") // its batch is open
	if _, err := p.PublishRaw(t.Context(), schemas.StepSubject("r1", "u3", 0, schemas.StageMain, "a", 0), []byte("x"),
		nil, ""); err != nil {
		t.Fatal(err) // an open group
	}
	if r, err := janitor.Pass(t.Context(), rule(), p.Bus, false); err != nil || r.Groups != 0 {
		t.Fatalf("within the grace: %+v, %v", r, err)
	}
	bustest.Until(t, "the end of the grace", func() error {
		r, err := janitor.Pass(t.Context(), rule(), p.Bus, true)
		if err == nil && (r.Groups != 1 || r.Kept["its batch is open"] != 1) {
			err = fmt.Errorf("would free %+v", r)
		}
		return err
	})
	if n := events(t, p, "u1"); n != 4 {
		t.Errorf("a dry run left %d events, want 4", n)
	}
	r, err := janitor.Pass(t.Context(), rule(), p.Bus, false)
	if err != nil || r.Groups != 1 || r.Messages[schemas.StreamSteps] != 1 || r.Total() < 3000 {
		t.Errorf("freed %+v, %v", r, err)
	}
	for uid, want := range map[schemas.UID]int{"u1": 0, "u2": 4, "u3": 1} {
		if n := events(t, p, uid); n != want {
			t.Errorf("of %s are left %d events, want %d", uid, n, want)
		}
	}
}

// The pass after one that has freed a group looks for the blobs that it named; without one there is nothing to look
// for.
func TestRun_LooksForBlobsOfFreedGroups(t *testing.T) {
	p := bustest.New(t)
	store(t, p, "u1", "u1")
	pass := janitor.NewPasses()
	for _, step := range []struct {
		rule    janitor.Config
		groups  int
		indexed bool
	}{{janitor.DefaultConfig(), 0, false}, {rule(), 1, false}, {rule(), 0, true}} {
		if step.groups > 0 {
			overGrace(t, p, step.groups)
		}
		if r, indexed, err := pass(t.Context(), step.rule, p.Bus); err != nil || r.Groups != step.groups ||
			indexed != step.indexed {
			t.Fatalf("freed %d groups, index %v, %v; want %d, %v", r.Groups, indexed, err, step.groups, step.indexed)
		}
	}
}

// What a durable has not acknowledged stays, whatever the rule; the rule of readers alone frees
// nothing where there is none.
func TestPass_Readers(t *testing.T) {
	p := bustest.New(t)
	store(t, p, "u1", "u1")
	store(t, p, "u2", "u2")
	read := janitor.DefaultConfig()
	read.Read, read.Grace = true, minGrace
	passed := func(c janitor.Config, groups, kept int) {
		t.Helper()
		bustest.Until(t, "a pass", func() error {
			r, err := janitor.Pass(t.Context(), c, p.Bus, true)
			if n := 0; err == nil {
				for _, k := range r.Kept {
					n += k
				}
				if r.Groups != groups || n != kept {
					err = fmt.Errorf("would free %+v, want %d, and keep %d", r, groups, kept)
				}
			}
			return err
		})
	}
	passed(read, 0, 2)
	js, err := jetstream.New(p.Conn())
	if err != nil {
		t.Fatal(err)
	}
	reads := jetstream.ConsumerConfig{Durable: "trainer", AckPolicy: jetstream.AckExplicitPolicy}
	trainer, err := js.CreateConsumer(t.Context(), schemas.StreamAdvantages, reads)
	if err != nil {
		t.Fatal(err)
	}
	passed(read, 0, 2)
	passed(rule(), 0, 2)
	m, err := trainer.Next()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.DoubleAck(t.Context()); err != nil {
		t.Fatal(err)
	}
	passed(read, 1, 1)
	passed(rule(), 1, 1)
}

// A durable that reads batches keeps their groups until it has acknowledged their batch, though another batch closed
// before it.
func TestPass_BatchReaders(t *testing.T) {
	p := bustest.New(t)
	js, err := jetstream.New(p.Conn())
	if err != nil {
		t.Fatal(err)
	}
	trainer, err := js.CreateConsumer(t.Context(), schemas.StreamAdvantages, jetstream.ConsumerConfig{
		Durable: "trainer", AckPolicy: jetstream.AckExplicitPolicy, FilterSubject: schemas.BatchSubject("r1", "*"),
	})
	if err != nil {
		t.Fatal(err)
	}
	store(t, p, "u1", "b1")
	store(t, p, "u2", "b2")
	for _, name := range []string{"b2", "b1"} {
		uid := schemas.UID("u" + name[1:])
		e := &schemas.Batch{Run: "r1", Batch: name, Groups: 1, UIDs: []schemas.UID{uid}, StdBasis: "sample", Closed: 1}
		if _, err := p.Publish(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	kept := "consumer trainer has not read its batch"
	for groups := range 3 { // acknowledged, and so freed
		bustest.Until(t, "a pass", func() error {
			r, err := janitor.Pass(t.Context(), rule(), p.Bus, true)
			if err == nil && (r.Groups != groups || r.Kept[kept] != 2-groups) {
				err = fmt.Errorf("would free %+v, want %d", r, groups)
			}
			return err
		})
		if groups == 2 {
			break
		}
		m, err := trainer.Next()
		if err != nil {
			t.Fatal(err)
		}
		if err := m.DoubleAck(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// gate is a way to a server that hands each command of the client to each, which sends it on; the answers go straight.
func gate(t *testing.T, p *bustest.Plane, each func(asked []byte, send func(command []byte))) *bus.Bus {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	server := strings.TrimPrefix(p.Config().URL, "nats://")
	go func() {
		client, err := l.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("tcp", server)
		if err != nil {
			t.Error(err)
			return
		}
		go func() { _, _ = io.Copy(client, far); _ = client.Close() }()
		defer func() { _ = far.Close() }()
		for in := bufio.NewReader(client); ; {
			command, err := in.ReadBytes('\n')
			fields := strings.Fields(string(command))
			if err == nil && (fields[0] == "PUB" || fields[0] == "HPUB") {
				size, _ := strconv.Atoi(fields[len(fields)-1])
				payload := make([]byte, size+2)
				_, err = io.ReadFull(in, payload)
				command = append(command, payload...)
			}
			if err != nil {
				return
			}
			each(command, func(command []byte) { _, _ = far.Write(command) })
		}
	}()
	c := p.Config()
	c.URL = "nats://" + l.Addr().String()
	return bustest.Connect(t, c)
}

var purges = []byte("$JS.API.STREAM.PURGE.")

// A durable that is made while the janitor looks is waited for: what it has not read stays, but for what was being
// freed.
func TestPass_DurableMadeMeanwhile(t *testing.T) {
	p := bustest.New(t, bustest.TCP)
	const groups = 100
	for i := range groups {
		store(t, p, schemas.UID(fmt.Sprintf("u%d", i)), fmt.Sprintf("u%d", i))
	}
	js, err := jetstream.New(p.Conn())
	if err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	b := gate(t, p, func(asked []byte, send func([]byte)) {
		defer send(asked)
		if bytes.Contains(asked, purges) {
			once.Do(func() {
				reads := jetstream.ConsumerConfig{Durable: "trainer", AckPolicy: jetstream.AckExplicitPolicy}
				if _, err := js.CreateConsumer(t.Context(), schemas.StreamAdvantages, reads); err != nil {
					t.Error(err)
				}
			})
		}
	})
	overGrace(t, p, groups)
	r, err := janitor.Pass(t.Context(), rule(), b, false)
	if err != nil {
		t.Fatal(err)
	}
	if r.Groups+r.Kept["consumer trainer has not read it"] != groups || r.Groups == 0 || r.Groups > 64 {
		t.Errorf("%d of %d groups freed, kept %v; want 64 at most, the others kept", r.Groups, groups, r.Kept)
	}
}

// Groups are freed side by side: no answer is needed of one to ask for the next.
func TestPass_SideBySide(t *testing.T) {
	p := bustest.New(t, bustest.TCP)
	const groups = 8
	for i := range groups {
		store(t, p, schemas.UID(fmt.Sprintf("u%d", i)), fmt.Sprintf("u%d", i))
	}
	overGrace(t, p, groups)
	// What is asked for is not sent before all groups have asked for something.
	uid := regexp.MustCompile(`\.(u\d)\.`)
	asked := map[string]bool{}
	var held [][]byte
	b := gate(t, p, func(command []byte, send func([]byte)) {
		if !bytes.Contains(command, purges) {
			send(command)
			return
		}
		if m := uid.FindSubmatch(command); m != nil {
			asked[string(m[1])] = true
		}
		if held = append(held, command); len(asked) == groups {
			for _, c := range held {
				send(c)
			}
			held = nil
		}
	})
	if r, err := janitor.Pass(t.Context(), rule(), b, false); err != nil || r.Groups != groups {
		t.Errorf("freed %+v, %v", r, err)
	}
}

// The result of a batch goes with the last of its groups, and prompts go with their group, however often they were
// published.
func TestPass_BatchesAndPrompts(t *testing.T) {
	p := bustest.New(t)
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		done := func(context.Context, *bus.Message) error { return nil }
		return b.Consume(ctx, bus.ConsumerConfig{Durable: schemas.PromptsDurable()}, done)
	})
	for _, uid := range []schemas.UID{"u1", "u2", "u1", "open", "u1"} {
		data, err := schemas.Encode(&schemas.Prompt{Prompt: "a red fox", UID: uid})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.PublishPrompt(t.Context(), "r1", data, nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.PublishRaw(t.Context(), schemas.GroupSubject("r1", "open"), []byte("x"), nil, ""); err != nil {
		t.Fatal(err)
	}
	store(t, p, "u1", "b1")
	store(t, p, "u2", "b1")
	e := &schemas.Batch{
		Run: "r1", Batch: "b1", Groups: 2, UIDs: []schemas.UID{"u1", "u2"}, StdBasis: schemas.BasisSample, Closed: 1,
	}
	if _, err := p.Publish(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	for _, dry := range []bool{true, false} {
		bustest.Until(t, "a pass", func() error {
			r, err := janitor.Pass(t.Context(), rule(), p.Bus, dry)
			if err == nil && (r.Messages[schemas.StreamAdvantages] != 3 || r.Messages[schemas.StreamPrompts] != 4) {
				err = fmt.Errorf("dry %v: freed %+v", dry, r)
			}
			return err
		})
	}
	for stream, want := range map[string]uint64{schemas.StreamAdvantages: 0, schemas.StreamPrompts: 1} {
		if n := p.Info(t, stream).State.Msgs; n != want {
			t.Errorf("%s has %d messages, want %d", stream, n, want)
		}
	}
}

// Blobs that have just been stored stay, so that groups would make no room in a full object store: none is freed for
// it.
func TestPass_YoungBlobs(t *testing.T) {
	p := bustest.New(t)
	store(t, p, "u1", "u1")
	p.Change(t, schemas.StreamBlobBucket, func(c *jetstream.StreamConfig) { c.MaxBytes = 1 << 20 })
	for i := range 9 {
		if _, err := p.PutBlob(t.Context(), bytes.Repeat([]byte{byte(i)}, 100_000)); err != nil {
			t.Fatal(err)
		}
	}
	overGrace(t, p, 1)
	full := janitor.DefaultConfig()
	full.Above, full.Grace = 50, minGrace
	if r, err := janitor.Pass(t.Context(), full, p.Bus, false); err != nil || r.Groups > 0 {
		t.Errorf("freed %+v, %v; want nothing", r, err)
	}
}

// What a group alone names goes with it, by the index that was made before.
func TestBlobIndex_Forget(t *testing.T) {
	p := bustest.New(t)
	var refs []schemas.Ref
	for _, name := range []string{"of one", "of both"} {
		ref, err := p.PutBlob(t.Context(), []byte(name))
		if err != nil {
			t.Fatal(err)
		}
		refs = append(refs, ref)
	}
	for uid, names := range map[schemas.UID]string{"u1": refs[0].Digest + " " + refs[1].Digest, "u2": refs[1].Digest} {
		if _, err := p.PublishRaw(t.Context(), schemas.TrajectorySubject("r1", uid, 0, schemas.StageMain),
			[]byte(names), nil, ""); err != nil {
			t.Fatal(err)
		}
	}
	without := func(m *bus.Message) bool { return strings.Contains(m.Subject, ".u1.") }
	for dry, want := range map[bool]int{true: 1, false: 0} { // one pass, without the events of u1
		gone := map[bool]func(*bus.Message) bool{true: without}[dry]
		x, err := p.IndexBlobs(t.Context(), 0, gone)
		if err != nil || !x.Counts() {
			t.Fatal(err)
		}
		if n, _, err := x.Sweep(t.Context(), true); err != nil || n != want {
			t.Errorf("dry %v: %d blobs, %v; want %d", dry, n, err, want)
		}
	}
	x, err := p.IndexBlobs(t.Context(), 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, step := range []struct {
		uid   schemas.UID
		freed int
	}{{"", 0}, {"u1", 1}, {"u2", 1}} {
		if step.uid != "" {
			m, err := p.Last(t.Context(), schemas.StreamTrajectories,
				schemas.TrajectorySubject("r1", step.uid, 0, schemas.StageMain))
			if err != nil {
				t.Fatal(err)
			}
			x.Forget(m)
		}
		if n, _, err := x.Sweep(t.Context(), false); err != nil || n != step.freed {
			t.Errorf("sweep %d: %d blobs, %v; want %d", i, n, err, step.freed)
		}
	}
}

// Blobs go when no stored event names them, not before they have been there for a while.
func TestPass_Blobs(t *testing.T) {
	p := bustest.New(t)
	ctx := context.Background()
	var refs []schemas.Ref
	for _, s := range []string{"named", "nameless", "asked for"} {
		ref, err := p.PutBlob(ctx, []byte(s))
		if err != nil {
			t.Fatal(err)
		}
		refs = append(refs, ref)
	}
	if _, err := p.PublishRaw(ctx, schemas.TrajectorySubject("r1", "u1", 0, schemas.StageMain),
		[]byte("\xd9\x40"+refs[0].Digest+"."), nil, ""); err != nil {
		t.Fatal(err)
	}
	request := schemas.RequestSubject("r1", "signs", "u2", 0, schemas.StageMain) // in a work queue
	if _, err := p.PublishRaw(ctx, request, []byte("\xd9\x40"+refs[2].Digest+"."), nil, ""); err != nil {
		t.Fatal(err)
	}
	if n, err := p.SweepBlobs(ctx, time.Hour, false); n != 0 || err != nil {
		t.Errorf("%d young blobs swept, %v", n, err)
	}
	for _, dry := range []bool{true, false} {
		if n, err := p.SweepBlobs(ctx, 0, dry); n != 1 || err != nil {
			t.Errorf("dry %v: %d blobs swept, %v; want 1", dry, n, err)
		}
	}
	for _, ref := range []schemas.Ref{refs[0], refs[2]} {
		if err := p.HasBlob(ctx, ref); err != nil {
			t.Errorf("one that is named: %v", err)
		}
	}
	if err := p.HasBlob(ctx, refs[1]); err == nil {
		t.Error("the nameless one is there")
	}
	if n, err := p.Subjects(ctx, schemas.StreamBlobBucket, ">"); err != nil || len(n) != 4 {
		t.Errorf("left are %v, %v", n, err)
	}
}

// digest names the weights of a version.
func digest(v int64) string { return fmt.Sprintf("%064x", 0xabc000+v) }

// push stores a version of the lane signs.
func push(t *testing.T, p *bustest.Plane, v int64, last *schemas.Policy, data []byte) (schemas.Ref, *schemas.Policy) {
	t.Helper()
	ref, err := p.PutBlob(t.Context(), data)
	if err != nil {
		t.Fatal(err)
	}
	next := bare(v)
	next.Adapter = &schemas.PolicyAdapter{File: ref, Scale: 1}
	if err := p.SetPolicy(t.Context(), next, last); err != nil {
		t.Fatal(err)
	}
	return ref, next
}

// bare is a version of the lane signs.
func bare(v int64) *schemas.Policy {
	return &schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   "signs", Model: "signs", PolicyVersion: v, WeightsDigest: digest(v), BaseDigest: "base",
		LatentChannels: 64, PixelsPerToken: 16, Height: 64, Width: 64, NumInferenceSteps: 4, TrueCFGScale: 1, MaxPixels: 1 << 20, Announced: 1,
	}
}

// Versions to go back to take a quarter of the object store at most, but for the last two.
func TestSweepBlobs_LargeAdapters(t *testing.T) {
	p := bustest.New(t)
	p.Change(t, schemas.StreamBlobBucket, func(c *jetstream.StreamConfig) { c.MaxBytes = 1 << 20 })
	var last *schemas.Policy
	for size, left := range map[int]int{80_000: 3, 150_000: 2} {
		var refs []schemas.Ref
		for i := range int64(5) {
			v := int64(0)
			if last != nil {
				v = last.PolicyVersion + 1
			}
			ref, next := push(t, p, v, last, bytes.Repeat([]byte{byte(i)}, size))
			refs, last = append(refs, ref), next
		}
		if _, err := p.SweepBlobs(t.Context(), 0, false); err != nil {
			t.Fatal(err)
		}
		for i, ref := range refs {
			if err := p.HasBlob(t.Context(), ref); (err == nil) != (i >= len(refs)-left) {
				t.Errorf("adapter %d of %d bytes: %v; want the last %d", i, size, err, left)
			}
		}
	}
}

// The adapters of versions that stored samples were made with stay, however old they are: of a sample that went on with
// other versions, all of them. So do those of the newest versions. The others go, and once the samples are gone, theirs
// too.
func TestPass_Adapters(t *testing.T) {
	p := bustest.New(t)
	const versions = 20
	var refs []schemas.Ref
	var last *schemas.Policy
	for v := range int64(versions) {
		ref, next := push(t, p, v, last, fmt.Appendf(nil, "adapter %d", v))
		refs, last = append(refs, ref), next
	}
	for uid, made := range map[schemas.UID]*schemas.Trajectory{
		"one":     {Provenance: schemas.Provenance{WeightsDigest: digest(2), PolicyVersionMin: 2, PolicyVersionMax: 2}},
		"several": {Provenance: schemas.Provenance{WeightsDigest: digest(7), PolicyVersionMin: 5, PolicyVersionMax: 7}},
		"later":   {Provenance: schemas.Provenance{WeightsDigest: digest(11), PolicyVersionMin: 10, PolicyVersionMax: 11}},
	} {
		made.Run, made.UID, made.Lane = "r1", uid, "signs"
		data, err := schemas.Encode(made)
		if err != nil {
			t.Fatal(err)
		}
		subject := schemas.TrajectorySubject("r1", uid, 0, schemas.StageMain)
		if _, err := p.PublishRaw(t.Context(), subject, data, nil, ""); err != nil {
			t.Fatal(err)
		}
	}
	left := func(want ...int64) {
		t.Helper()
		if _, err := p.SweepBlobs(t.Context(), 0, false); err != nil {
			t.Fatal(err)
		}
		var got []int64
		for v, ref := range refs {
			if p.HasBlob(t.Context(), ref) == nil {
				got = append(got, int64(v))
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("adapters %v are left, want %v", got, want)
		}
	}
	left(2, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19)
	several := schemas.TrajectorySubject("r1", "several", 0, schemas.StageMain)
	if _, err := p.PurgeSubject(t.Context(), schemas.StreamTrajectories, several); err != nil {
		t.Fatal(err)
	}
	left(2, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19)
}
