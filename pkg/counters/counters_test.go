package counters_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/vmihailenco/msgpack/v5"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/schemas"
)

// world is a plane with events that nothing but this test makes.
type world struct {
	*bustest.Plane
	t   *testing.T
	rng *rand.Rand
}

// pick returns one of a few names.
func (w *world) pick(name string, of int) string { return name + strconv.Itoa(w.rng.IntN(of)) }

// publish stores a random event; one that is there already is refused, as for every publisher.
func (w *world) publish() {
	one := func(of ...string) string { return of[w.rng.IntN(len(of))] }
	run, uid := schemas.Run(w.pick("run", 4)), schemas.UID(w.pick("u", 6))
	a := schemas.Address{
		Run: run, UID: uid, Sample: strconv.Itoa(w.rng.IntN(3)), Step: "s" + strconv.Itoa(w.rng.IntN(2)),
		Stage: schemas.StageMain, Batch: one(string(uid), "b0", "b1"),
	}
	outcome := ""
	switch a.Kind = one(schemas.KindPrompt, schemas.KindGroup, schemas.KindOpening, schemas.KindTrajectory,
		schemas.KindReward, schemas.KindAdvantage, schemas.KindBatch, schemas.KindDead, schemas.KindStepReward,
		schemas.KindSelection); a.Kind {
	case schemas.KindTrajectory:
		outcome = one(schemas.StopReasons...)
	case schemas.KindReward:
		outcome = one(schemas.RewardStatuses...)
	case schemas.KindAdvantage:
		outcome = one(append([]string{"not an outcome"}, schemas.GroupStatuses...)...)
	case schemas.KindDead:
		a.Service = one(schemas.ServiceIntake, schemas.ServiceReward)
	}
	m := &nats.Msg{Subject: a.Filter(), Data: []byte("x")}
	if a.Kind == schemas.KindReward || a.Kind == schemas.KindOpening { // the server adds the partition
		at := strings.Split(m.Subject, ".")
		m.Subject = strings.Join(append(at[:3], at[4:]...), ".")
	}
	if outcome != "" {
		m.Header = nats.Header{schemas.HeaderOutcome: {outcome}}
	}
	if a.Kind == schemas.KindSelection {
		m.Header = nats.Header{schemas.HeaderSaved: {one("3", "5", "not a number")}}
	}
	if a.Kind == schemas.KindTrajectory && w.rng.IntN(2) == 0 { // of a stage, which ends so many samples
		a.Stage = "think"
		m.Subject = a.Filter()
		m.Header.Set(schemas.HeaderSamples, one("0", "1", "2", "not a number"))
	}
	_, _ = w.JetStream().PublishMsg(w.t.Context(), m)
}

var streams = []string{
	schemas.StreamPrompts, schemas.StreamGroups, schemas.StreamTrajectories, schemas.StreamRewards,
	schemas.StreamAdvantages, schemas.StreamDead, schemas.StreamVerdicts,
}

// full counts a run by reading all that is stored, and as simply as can be.
func (w *world) full(run schemas.Run) string {
	count, groups, closed := map[string]int{}, map[schemas.UID]bool{}, map[schemas.UID]bool{}
	batches, ended, letters := map[string]bool{}, map[string]bool{}, map[schemas.UID]int{}
	for _, stream := range streams {
		for m, err := range w.Read(w.t.Context(), stream, nil, bus.ReadOptions{}) {
			if err != nil {
				w.t.Fatal(err)
			}
			a, _ := schemas.ParseSubject(m.Subject)
			if a.Run != run {
				continue
			}
			outcome, err := w.Outcome(w.t.Context(), m)
			if err != nil {
				w.t.Fatal(err)
			}
			count[stream]++
			ends := 1
			if a.Stage == "think" {
				ends, _ = strconv.Atoi(m.Header.Get(schemas.HeaderSamples))
			}
			if outcome != "" {
				count[a.Kind+" "+outcome] += ends
			}
			switch a.Kind {
			case schemas.KindGroup:
				groups[a.UID] = true
			case schemas.KindAdvantage:
				closed[a.UID] = closed[a.UID] || outcome != ""
			case schemas.KindOpening:
				batches[a.Batch] = batches[a.Batch] || a.Batch != string(a.UID)
			case schemas.KindSelection:
				saved, _ := strconv.Atoi(m.Header.Get(schemas.HeaderSaved))
				count["saved"] += saved
			case schemas.KindBatch:
				ended[a.Batch] = true
			case schemas.KindDead:
				if a.Service == schemas.ServiceIntake {
					letters[a.UID]++
				}
			}
		}
	}
	for uid := range groups {
		if !closed[uid] {
			count["open"]++
		}
	}
	for batch, is := range batches {
		if is && !ended[batch] {
			count["open batches"]++
		}
	}
	for uid, n := range letters {
		if !groups[uid] {
			count["refused"] += n
		}
	}
	delete(count, schemas.StreamDead) // of no run
	return text(count)
}

// told says the same of counts.
func told(r *counters.Run) string {
	count := map[string]int{}
	if r == nil {
		return text(count)
	}
	for _, o := range r.Outcomes {
		count[o.Kind+" "+o.Outcome] = int(o.N)
	}
	for stream := range r.All() {
		count[stream] = int(r.Events(stream))
	}
	count["open"], count["open batches"], count["refused"] = len(r.Open), len(r.Batches), int(r.Refused())
	count["saved"] = int(r.Saved)
	delete(count, schemas.StreamDead)
	return text(count)
}

func text(count map[string]int) string {
	maps.DeleteFunc(count, func(_ string, n int) bool { return n == 0 })
	data, _ := json.Marshal(count) // sorted by key
	return string(data)
}

// check compares looks at each run, and at all, with full readings.
func (w *world) check(after string) {
	w.t.Helper()
	all, err := counters.Look(w.t.Context(), w.Bus, "*")
	if err != nil {
		w.t.Fatal(err)
	}
	for i := range 4 {
		run := schemas.Run("run" + strconv.Itoa(i))
		one, err := counters.Look(w.t.Context(), w.Bus, run)
		if err != nil {
			w.t.Fatal(err)
		}
		want := w.full(run)
		if all[run] == nil && !strings.Contains(want, "MDR_") { // only letters: no run
			continue
		}
		if got := told(all[run]); got != want {
			w.t.Fatalf("after %s: a look at all says of %s\n%s, a full reading\n%s", after, run, got, want)
		}
		if got := told(one[run]); got != want {
			w.t.Fatalf("after %s: a look at %s says\n%s, a full reading\n%s", after, run, got, want)
		}
	}
}

// remove removes random events.
func (w *world) remove() string {
	run := schemas.Run(w.pick("run", 4))
	switch w.rng.IntN(4) {
	case 0:
		if _, err := w.Purge(w.t.Context(), run); err != nil {
			w.t.Fatal(err)
		}
		return "purge of " + string(run)
	case 1: // as the janitor does
		uid := schemas.UID(w.pick("u", 6))
		for stream, filter := range map[string]string{
			schemas.StreamGroups:       schemas.GroupSubject(run, uid),
			schemas.StreamAdvantages:   schemas.AdvantageSubject(run, uid),
			schemas.StreamTrajectories: schemas.TrajectoryFilter(run, uid),
		} {
			if _, err := w.PurgeSubject(w.t.Context(), stream, filter); err != nil {
				w.t.Fatal(err)
			}
		}
		return "free of " + string(run) + " " + string(uid)
	}
	stream := streams[w.rng.IntN(len(streams))]
	info := w.Info(w.t, stream)
	for range 5 {
		_ = w.Delete(w.t.Context(), stream, info.State.FirstSeq+uint64(w.rng.IntN(1+int(info.State.LastSeq))))
	}
	return "deletes of " + stream
}

// damage damages or removes a record, the head or the pack.
func (w *world) damage() string {
	ctx, key := w.t.Context(), counters.Key(schemas.Run(w.pick("run", 4)))
	switch head, _, _ := strings.Cut(key, "."); w.rng.IntN(3) {
	case 0:
		key = head
	case 1:
		key = "pack." + head
	}
	kv, err := w.JetStream().KeyValue(ctx, schemas.CountBucket)
	if err != nil {
		w.t.Fatal(err)
	}
	if _, err = kv.PutString(ctx, key, "damaged"); w.rng.IntN(2) == 0 && err == nil {
		_, err = w.PurgeSubject(ctx, schemas.StreamCountBucket, schemas.BucketSubject(schemas.CountBucket, key))
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return "the loss of " + key
}

// Whatever is published, removed, in whatever order, and whichever process advances the records, is stopped, or
// writes what it read long ago: counts are those of a full reading.
func TestLook_EqualsAFullReading(t *testing.T) {
	t.Parallel()
	const steps = 120
	for seed := range uint64(3) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			w := &world{bustest.New(t), t, rand.New(rand.NewPCG(seed, 1))}
			other := w.Connect(t)
			ctx := t.Context()
			var late []func()
			for range steps {
				for range w.rng.IntN(12) {
					w.publish()
				}
				what := "publishes"
				switch w.rng.IntN(11) {
				case 0:
					what = w.remove()
				case 9:
					if err := counters.Pack(ctx, w.Bus); err != nil {
						t.Fatal(err)
					}
					what = "a pack"
				case 1, 2: // killed with some records written
					write, err := counters.Begin(ctx, w.Bus, "*", w.rng.IntN(4))
					if err != nil {
						t.Fatal(err)
					}
					write()
					what = "a kill"
				case 3, 4: // writes later
					write, err := counters.Begin(ctx, other,
						schemas.Run([]string{"*", w.pick("run", 4)}[w.rng.IntN(2)]), -1)
					if err != nil {
						t.Fatal(err)
					}
					late = append(late, write)
					continue
				case 5:
					for _, write := range late {
						write()
					}
					late, what = nil, "late writes"
				case 6: // side by side
					g, ctx := errgroup.WithContext(ctx)
					for _, b := range []*bus.Bus{w.Bus, other, w.Bus} {
						g.Go(func() error { return counters.Advance(ctx, b) })
					}
					if err := g.Wait(); err != nil {
						t.Fatal(err)
					}
					what = "two who advance"
				case 7:
					if err := counters.Advance(ctx, w.Bus); err != nil {
						t.Fatal(err)
					}
					what = "an advance"
				case 8: // a lost or damaged record
					what = w.damage()
				}
				w.check(what)
			}
		})
	}
}

// Samples wait at a step until it is known which of their group end there; those that end have saved evaluations.
func TestStatus_Midway(t *testing.T) {
	t.Parallel()
	w := &world{bustest.New(t), t, nil}
	send := func(kind string, uid schemas.UID, sample string, header, value string) {
		t.Helper()
		a := schemas.Address{Kind: kind, Run: "r", UID: uid, Sample: sample, Step: "2"}
		m := &nats.Msg{Subject: a.Filter(), Data: []byte("x"), Header: nats.Header{header: {value}}}
		if _, err := w.JetStream().PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	want := func(after string, midway, saved int64) {
		t.Helper()
		for _, records := range []bool{false, true} {
			if err := counters.Advance(t.Context(), w.Bus); records && err != nil {
				t.Fatal(err)
			}
			s, err := counters.Status(t.Context(), w.Bus, "r")
			if err != nil || s.Midway != midway || s.SavedEvaluations != saved {
				t.Errorf("after %s: %+v, %v; want %d samples and %d evaluations", after, s, err, midway, saved)
			}
		}
	}
	send(schemas.KindGroup, "a", "", "none", "")
	send(schemas.KindGroup, "b", "", "none", "")
	send(schemas.KindStepReward, "a", "0", "none", "")
	send(schemas.KindStepReward, "a", "1", "none", "")
	want("two rewards", 2, 0)
	send(schemas.KindStepReward, "b", "0", "none", "")
	want("another group", 3, 0)
	send(schemas.KindSelection, "a", "", schemas.HeaderSaved, "6")
	want("a choice", 1, 6)
	send(schemas.KindStepReward, "a", "2", "none", "")
	want("a late sample", 1, 6)
	send(schemas.KindAdvantage, "b", "", schemas.HeaderOutcome, schemas.StatusFailed)
	want("a result", 0, 6)
}

// While others publish, and after records are there, a look reads what is new and nothing else.
func TestAdvance_ReadsOnce(t *testing.T) {
	t.Parallel()
	w := &world{bustest.New(t), t, rand.New(rand.NewPCG(1, 2))}
	for range 300 {
		w.publish()
	}
	if err := counters.Advance(t.Context(), w.Bus); err != nil {
		t.Fatal(err)
	}
	before := w.Info(t, schemas.StreamCountBucket).State.LastSeq
	if err := counters.Advance(t.Context(), w.Bus); err != nil {
		t.Fatal(err)
	}
	w.check("an advance")
	if after := w.Info(t, schemas.StreamCountBucket).State.LastSeq; after != before {
		t.Errorf("%d records are written though nothing is new", after-before)
	}
}

// Of many runs, more than one direct get answers, the records are in one entry, too. What is newer counts, a run that
// was removed does not, and the entry is made again.
func TestAdvance_Packs(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	advance := func(from, to int) (pack uint64) {
		t.Helper()
		for i := from; i < to; i++ {
			p.Forge(t, schemas.GroupSubject(schemas.Run(fmt.Sprint("r", i)), "a"), []byte("a record"))
		}
		if err := counters.Advance(t.Context(), p.Bus); err != nil {
			t.Fatal(err)
		}
		packs, err := p.Entries(t.Context(), schemas.CountBucket, "pack.*")
		if err != nil || len(packs) != 1 {
			t.Fatalf("%d packs, %v; want 1", len(packs), err)
		}
		return packs[0].Revision
	}
	look := func(want int) {
		t.Helper()
		runs, err := counters.Look(t.Context(), p.Bus, "*")
		for run, r := range runs {
			if r.Groups != 1 {
				t.Errorf("%s: %d groups; want 1", run, r.Groups)
			}
		}
		if err != nil || len(runs) != want {
			t.Errorf("%d runs, %v; want %d", len(runs), err, want)
		}
	}
	const most = 1024 // of a direct get
	first := advance(0, most+10)
	look(most + 10)
	if again := advance(most+10, most+20); again != first {
		t.Errorf("ten records that are new made pack %d of %d", again, first)
	}
	look(most + 20)
	if _, err := p.Purge(t.Context(), "r0"); err != nil {
		t.Fatal(err)
	}
	look(most + 19)
	advance(0, 0)
	look(most + 19)
}

// BenchmarkLook compares a fresh look at 1,000 runs of 100 samples by their records with one that reads all events:
// the processor time of client and server, and the ratio.
func BenchmarkLook(b *testing.B) {
	p := bustest.New(b)
	js, err := jetstream.New(p.Conn(), jetstream.WithPublishAsyncMaxPending(4096))
	if err != nil {
		b.Fatal(err)
	}
	publish := func(a schemas.Address, outcome string) {
		m := nats.NewMsg(a.Filter())
		if a.Kind == schemas.KindReward {
			m.Subject = strings.Replace(m.Subject, a.Kind+"."+strconv.Itoa(schemas.Partition(a.Batch)), a.Kind, 1)
		}
		if m.Data = make([]byte, 200); outcome != "" {
			m.Header.Set(schemas.HeaderOutcome, outcome)
		}
		if _, err := js.PublishMsgAsync(m, jetstream.WithRetryAttempts(100)); err != nil {
			b.Fatal(err)
		}
	}
	for run := range 1000 {
		for group := range 25 {
			a := schemas.Address{
				Run: schemas.Run(fmt.Sprint("run", run)), UID: schemas.UID(fmt.Sprint("p", group)), Stage: schemas.StageMain,
			}
			a.Batch = string(a.UID)
			for _, a.Kind = range []string{schemas.KindPrompt, schemas.KindGroup} {
				publish(a, "")
			}
			for sample := range 4 {
				a.Sample, a.Kind = strconv.Itoa(sample), schemas.KindTrajectory
				publish(a, schemas.StopCompleted)
				a.Kind = schemas.KindReward
				publish(a, schemas.StatusScored)
			}
			a.Kind = schemas.KindAdvantage
			publish(a, schemas.StatusComplete)
		}
	}
	<-js.PublishAsyncComplete()
	look := func() (cpu time.Duration) {
		var before, after syscall.Rusage
		_ = syscall.Getrusage(syscall.RUSAGE_SELF, &before)
		runs, err := counters.Look(b.Context(), p.Bus, "*")
		_ = syscall.Getrusage(syscall.RUSAGE_SELF, &after)
		if err != nil || len(runs) != 1000 {
			b.Fatal(len(runs), err)
		}
		return time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
	}
	without := look() // its writes are in it
	cpu := time.Duration(0)
	for b.Loop() {
		cpu += look()
	}
	with := cpu / time.Duration(b.N)
	b.ReportMetric(with.Seconds()*1000, "cpu-ms/look")
	b.ReportMetric(without.Seconds()*1000, "cpu-ms/full")
	b.ReportMetric(float64(with)/float64(without), "ratio")
}

// A record that says something else than the events of its run is found.
func TestCheck(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	for _, run := range []schemas.Run{"right", "wrong"} {
		for _, uid := range []schemas.UID{"a", "b"} {
			p.Forge(t, schemas.GroupSubject(run, uid), []byte("a record"))
		}
	}
	if err := counters.Advance(t.Context(), p.Bus); err != nil {
		t.Fatal(err)
	}
	check := func(want ...schemas.Run) {
		t.Helper()
		n, differ, err := counters.Check(t.Context(), p.Bus, 10)
		if err != nil || n != 2 || !slices.Equal(differ, want) {
			t.Errorf("%d compared, %v differ, %v; must be 2, %v", n, differ, err, want)
		}
	}
	check()
	kv, err := p.JetStream().KeyValue(t.Context(), schemas.CountBucket)
	if err != nil {
		t.Fatal(err)
	}
	e, err := kv.Get(t.Context(), counters.Key("wrong"))
	if err != nil {
		t.Fatal(err)
	}
	var record map[string]any
	if err := msgpack.Unmarshal(e.Value(), &record); err != nil {
		t.Fatal(err)
	}
	record["g"] = 7
	data, err := msgpack.Marshal(record)
	if err == nil {
		_, err = kv.Put(t.Context(), counters.Key("wrong"), data)
	}
	if err != nil {
		t.Fatal(err)
	}
	check("wrong")
}
