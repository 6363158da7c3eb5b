package prove_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/advantage"
	"github.com/meander-rl/meander/services/prove"
	"github.com/meander-rl/meander/services/reward"
)

// The run that is shipped: two updates of an adapter of signs, by meander-train ('make learn-proof').
const proof = "../../deploy/learn/proof/"

func read(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func options() prove.Options {
	return prove.Options{
		Version: -1, Samples: 2, Reward: reward.DefaultConfig(), Advantage: advantage.DefaultConfig(), Log: zerolog.Nop(),
	}
}

// run proves in a store of its own.
func run(t *testing.T, archive []byte, o prove.Options) *prove.Report {
	t.Helper()
	r, err := prove.Run(t.Context(), bustest.New(t).Bus, "signs.tar", bytes.NewReader(archive), o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// verdicts returns link, what it is of and verdict of each link.
func verdicts(r *prove.Report) (out []string) {
	for _, l := range r.Links {
		out = append(out, strings.TrimSpace(l.Link+" "+l.Of)+": "+l.Verdict)
	}
	return out
}

// Every link of the shipped adapter is computed again, by its files, its version, or as the newest.
func TestRun_EveryLink(t *testing.T) {
	archive := read(t, proof+"signs.tar")
	links := func(update int) (out []string) {
		for _, l := range []string{"batch", "sums", "trajectories", "rewards", "advantages", "prompts"} {
			out = append(out, fmt.Sprintf("%s update %d: holds", l, update))
		}
		return append(out, fmt.Sprintf("update update %d: left out", update))
	}
	begin := []string{"archive: holds", "weights version 2: holds", "chain update 2: holds"}
	for name, of := range map[string]struct {
		change func(o *prove.Options)
		want   []string
	}{
		"newest":  {func(*prove.Options) {}, slices.Concat(begin, links(2))},
		"adapter": {func(o *prove.Options) { o.Adapter = proof + "adapter" }, slices.Concat(begin, links(2))},
		"all": {
			func(o *prove.Options) { o.Version, o.All = 2, true },
			slices.Concat(begin, links(2), []string{"weights version 1: holds"}, links(1)),
		},
		"before": {
			func(o *prove.Options) { o.Version = 1 },
			slices.Concat([]string{"archive: holds", "weights version 1: holds", "chain update 1: holds"}, links(1)),
		},
		"the checkpoint": {
			func(o *prove.Options) { o.Version = 0 },
			[]string{"archive: holds", "weights version 0: holds"},
		},
	} {
		o := options()
		of.change(&o)
		r := run(t, archive, o)
		if got := verdicts(r); !slices.Equal(got, of.want) || !r.Proved || len(r.Faults()) > 0 {
			t.Errorf("%s: %q, proved %t; want %q\n%+v", name, got, r.Proved, of.want, r.Links)
		}
	}
}

// Of a tenant that is named no weights of another are proved.
func TestRun_OtherTenant(t *testing.T) {
	o := options()
	o.Adapter, o.Tenant = proof+"adapter", "alice"
	r, err := prove.Run(t.Context(), nil, "", bytes.NewReader(read(t, proof+"signs.tar")), o)
	if err != nil || r.Proved || !strings.Contains(r.Links[1].What, "no version of alice in the archive") {
		t.Errorf("%+v, %v", r.Links, err)
	}
}

// A changed byte anywhere is found: one in each 4 KiB of the archive, in headers and lists, and in the adapter.
func TestRun_ChangedByte(t *testing.T) {
	archive := read(t, proof+"signs.tar")
	random := rand.New(rand.NewPCG(1, 2))
	places := []int{len(archive) - 1}
	for at := 0; at < len(archive); at += 4096 {
		places = append(places, at+random.IntN(min(4096, len(archive)-at)))
	}
	for _, name := range []string{"mtime=", "path=", "SHA256SUMS", "# archive ", "ustar", "0000644"} {
		places = append(places, bytes.Index(archive, []byte(name))+random.IntN(len(name)+8),
			bytes.LastIndex(archive, []byte(name))+len(name)+random.IntN(8))
	}
	for _, at := range places {
		changed := slices.Clone(archive)
		changed[at] ^= 1 << random.IntN(8)
		r, err := prove.Run(t.Context(), nil, "", bytes.NewReader(changed), options())
		if err != nil || r.Proved || len(r.Links) != 1 || r.Links[0].Verdict != prove.Broken {
			t.Fatalf("byte %d: %+v, %v", at, r.Links, err)
		}
	}
	for _, name := range []string{"adapter_model.safetensors", "adapter_config.json"} {
		file := read(t, proof+"adapter/"+name)
		for at := 0; at < len(file); at += 1 + random.IntN(len(file)/25) {
			folder := t.TempDir()
			if err := os.CopyFS(folder, os.DirFS(proof+"adapter")); err != nil {
				t.Fatal(err)
			}
			changed := slices.Clone(file)
			changed[at] ^= 1 << random.IntN(8)
			if err := os.WriteFile(filepath.Join(folder, name), changed, 0o644); err != nil {
				t.Fatal(err)
			}
			o := options()
			o.Adapter = folder
			r, err := prove.Run(t.Context(), nil, "", bytes.NewReader(archive), o)
			if err != nil || r.Proved || len(r.Links) != 2 || r.Links[1].Verdict != prove.Broken {
				t.Fatalf("%s, byte %d: %+v, %v", name, at, r.Links, err)
			}
			if what := r.Links[1].What; !strings.Contains(what, name) && !strings.Contains(what, "adapter") {
				t.Fatalf("%s, byte %d: %s", name, at, what)
			}
		}
	}
}

// forged is the shipped run after a change of its newest event on a subject, as an archive that is whole in itself.
func forged[E any, P interface {
	*E
	schemas.Event
}](t *testing.T, stream, filter string, change func(e P),
) []byte {
	t.Helper()
	return forgedOf[E](t, proof+"signs.tar", stream, filter, change)
}

// forgedOf is forged of another run.
func forgedOf[E any, P interface {
	*E
	schemas.Event
}](t *testing.T, name, stream, filter string, change func(e P),
) []byte {
	t.Helper()
	plane := bustest.New(t)
	imported, err := export.Import(t.Context(), plane.Bus, bytes.NewReader(read(t, name)),
		export.ImportOptions{Policies: true})
	if err != nil {
		t.Fatal(err)
	}
	var last *bus.Message
	for m, err := range plane.Read(t.Context(), stream, []string{filter}, bus.ReadOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		last = m
	}
	e := bustest.Decode[E, P](t, last)
	if err := plane.Delete(t.Context(), stream, last.Seq); err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(e)
		plane.Forge(t, schemas.PublishedSubject(last.Subject), bustest.Encode(t, P(e)))
	}
	var out bytes.Buffer
	if _, err := export.WriteArchive(t.Context(), plane.Bus, imported.Run, &out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// An archive that was made anew around a forged event shows the link that does not hold; what lacks is unchecked.
func TestRun_Forged(t *testing.T) {
	all := func(kind string) string { return schemas.Address{Kind: kind, Run: "signs-proof"}.Filter() }
	update := func(change func(e *schemas.Update)) func(t *testing.T) []byte {
		return func(t *testing.T) []byte {
			return forged(t, schemas.StreamUpdates, all(schemas.KindUpdate), change)
		}
	}
	for name, of := range map[string]struct {
		archive func(t *testing.T) []byte
		want    string
	}{
		"an advantage": {func(t *testing.T) []byte {
			return forged(t, schemas.StreamAdvantages, all(schemas.KindAdvantage), func(e *schemas.Advantage) {
				*e.Members[0].Advantage += 1e-9
			})
		}, "batch update 2: broken"},
		"a score": {func(t *testing.T) []byte {
			return forged(t, schemas.StreamRewards, all(schemas.KindReward), func(e *schemas.Reward) {
				*e.Scores[0].Value += 1e-9
			})
		}, "rewards update 2: broken"},
		"the weights before": {func(t *testing.T) []byte {
			return forged(t, schemas.StreamUpdates, all(schemas.KindUpdate), func(e *schemas.Update) {
				e.WeightsBefore = strings.Repeat("0", 64)
			})
		}, "chain update 2: broken"},
		"weights of another version": {update(func(e *schemas.Update) { e.PolicyVersion = 1 }), "weights update 2: broken"},
		"a version that is not there": {
			update(func(e *schemas.Update) { e.PolicyVersion = 9 }), "weights update 2: unchecked",
		},
		"a mean": {func(t *testing.T) []byte {
			return forged(t, schemas.StreamAdvantages, all(schemas.KindAdvantage), func(e *schemas.Advantage) {
				*e.Mean += 1e-9
			})
		}, "advantages update 2: broken"},
		"a reward of a larger group": {func(t *testing.T) []byte {
			return forged(t, schemas.StreamRewards, all(schemas.KindReward), func(e *schemas.Reward) { e.GroupSize++ })
		}, "advantages update 2: broken"},
		"the text of a record": {func(t *testing.T) []byte {
			return forged(t, schemas.StreamGroups, all(schemas.KindGroup), func(e *schemas.GroupRecord) {
				e.Prompt = "another"
			})
		}, "prompts update 2: broken"},
		"a reward of a record": {func(t *testing.T) []byte {
			return forged(t, schemas.StreamGroups, all(schemas.KindGroup), func(e *schemas.GroupRecord) {
				*e.Group.Reward[0].Weight += 1e-9
			})
		}, "prompts update 2: broken"},
		"the settings of a record": {func(t *testing.T) []byte {
			return forged(t, schemas.StreamGroups, all(schemas.KindGroup), func(e *schemas.GroupRecord) {
				e.PromptDigest = "blake3:" + strings.Repeat("0", 64)
			})
		}, "prompts update 2: broken"},
		"the copy of a record": {func(t *testing.T) []byte {
			return forged(t, schemas.StreamRewards, all(schemas.KindOpening), func(e *schemas.Opening) {
				e.Group.Reward = e.Group.Reward[:1]
			})
		}, "prompts update 2: broken"},
		"an update of another trainer": {func(t *testing.T) []byte {
			return forged(t, schemas.StreamUpdates, all(schemas.KindUpdate), func(e *schemas.Update) {
				e.BatchDigest, e.WeightsBefore = "", ""
			})
		}, "batch update 2: unchecked"},
		"a reward that is gone": {func(t *testing.T) []byte {
			return forged[schemas.Reward](t, schemas.StreamRewards, all(schemas.KindReward), nil)
		}, "rewards update 2: unchecked"},
		"a result that is gone": {func(t *testing.T) []byte {
			return forged[schemas.Advantage](t, schemas.StreamAdvantages, all(schemas.KindAdvantage), nil)
		}, "batch update 2: unchecked"},
	} {
		t.Run(name, func(t *testing.T) {
			o := options()
			o.All = true
			r := run(t, of.archive(t), o)
			if got := verdicts(r); !slices.Contains(got, of.want) || r.Proved || len(r.Faults()) == 0 {
				t.Errorf("%q, proved %t; want %q\n%+v", got, r.Proved, of.want, r.Links)
			}
		})
	}
}

// rated is the shipped run with a function that rates whole groups in its newest group: its answers, with a change of
// them, and the scores made of them. It is whole in itself, but the prompt does not name the function.
func rated(t *testing.T, change func(e *schemas.Rating)) []byte {
	t.Helper()
	plane := bustest.New(t)
	if _, err := export.Import(t.Context(), plane.Bus, bytes.NewReader(read(t, proof+"signs.tar")),
		export.ImportOptions{Policies: true}); err != nil {
		t.Fatal(err)
	}
	batch := bustest.Decode[schemas.Batch](t, last(t, plane, schemas.StreamAdvantages, schemas.KindBatch))
	e := &schemas.Rating{Run: "signs-proof", UID: batch.UIDs[0], Name: "nats:rank", Version: "nats-1"}
	rewards, err := plane.LastMany(t.Context(), schemas.StreamRewards,
		[]string{schemas.RewardFilter(e.Run, "*", e.UID)})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range rewards {
		r := bustest.Decode[schemas.Reward](t, m)
		value := new(float64(r.SampleIndex))
		r.Group.Reward = append(r.Group.Reward, schemas.RewardSpec{Name: e.Name, GroupMin: 2, Weight: new(0.0)})
		r.Scores = append(r.Scores, schemas.Score{
			Name: e.Name, Version: e.Version, Status: schemas.StatusScored, Value: value, Members: int64(len(rewards)),
		})
		e.GroupSize, e.Function = r.GroupSize, int64(len(r.Scores)-1)
		e.Members = append(e.Members,
			schemas.RatedMember{SampleIndex: r.SampleIndex, TrajectorySeq: r.TrajectorySeq, Value: value})
		if err := plane.Delete(t.Context(), m.Stream, m.Seq); err != nil {
			t.Fatal(err)
		}
		plane.Forge(t, schemas.PublishedSubject(m.Subject), bustest.Encode(t, r))
	}
	slices.SortFunc(e.Members, func(a, b schemas.RatedMember) int { return int(a.SampleIndex - b.SampleIndex) })
	if change != nil {
		change(e)
	}
	if e.Members != nil {
		plane.Forge(t, e.Subject(), bustest.Encode(t, e))
	}
	var out bytes.Buffer
	if _, err := export.WriteArchive(t.Context(), plane.Bus, "signs-proof", &out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func last(t *testing.T, plane *bustest.Plane, stream, kind string) (found *bus.Message) {
	t.Helper()
	for m, err := range plane.Read(t.Context(), stream,
		[]string{schemas.Address{Kind: kind, Run: "signs-proof"}.Filter()}, bus.ReadOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		found = m
	}
	return found
}

// Scores that functions of whole groups gave are held to the stored answers.
func TestRun_Ratings(t *testing.T) {
	for name, of := range map[string]struct {
		change        func(e *schemas.Rating)
		verdict, what string
	}{
		"holds":           {nil, "holds", "stored answers about whole groups"},
		"another value":   {func(e *schemas.Rating) { e.Members[1].Value = new(7.0) }, "broken", "is the stored answer"},
		"no value":        {func(e *schemas.Rating) { e.Members[1].Value, e.Members[1].Error = nil, "no" }, "broken", "nothing is"},
		"another sample":  {func(e *schemas.Rating) { e.Members[1].TrajectorySeq++ }, "broken", ""},
		"a member less":   {func(e *schemas.Rating) { e.Members = e.Members[:1] }, "broken", ""},
		"another version": {func(e *schemas.Rating) { e.Version = "nats-2" }, "broken", "version"},
		"another name":    {func(e *schemas.Rating) { e.Name = "nats:other" }, "broken", "nats:other"},
		"win rates": {func(e *schemas.Rating) {
			e.Preferences = []schemas.Preference{{A: 1, B: 0, P: 1}}
		}, "holds", "stored answers about whole groups"},
		"other comparisons": {func(e *schemas.Rating) {
			e.Preferences = []schemas.Preference{{A: 1, B: 0, P: 1 - 1e-9}}
		}, "broken", "its comparisons of members give"},
		"gone": {func(e *schemas.Rating) { e.Members = nil }, "unchecked", "not in the archive"},
	} {
		t.Run(name, func(t *testing.T) {
			o := options()
			o.Only = []string{"archive", "ratings"}
			r := run(t, rated(t, of.change), o)
			i := slices.IndexFunc(r.Links, func(l prove.Link) bool { return l.Link == prove.LinkRatings })
			if i < 0 || r.Links[i].Verdict != of.verdict || !strings.Contains(r.Links[i].What, of.what) {
				t.Errorf("%+v; want %s: %s", r.Links, of.verdict, of.what)
			}
		})
	}
}

// The trainer is asked for each update with the archive's name, and what it prints is the link. One that says nothing
// leaves it unchecked, and one that is not there is a mistake of the call.
func TestRun_Trainer(t *testing.T) {
	archive := read(t, proof+"signs.tar")
	say := func(text string) []string { return []string{"sh", "-c", "echo " + text, "trainer"} }
	off := say(`'{"link": "update", "verdict": "unchecked", "what": "off", "off": 1e-05}'; exit 1`)
	for name, of := range map[string]struct {
		trainer []string
		passes  float64
		want    prove.Link
	}{
		"holds": {
			say(`'{"link": "update", "verdict": "holds", "what": "'$*'"}'`), 0,
			prove.Link{
				Link: "update", Of: "update 2", Verdict: "holds",
				What: "--replay signs.tar@2 --json --lane signs --tenant main --trainer trainer",
			},
		},
		"broken": {
			say(`'{"link": "update", "verdict": "broken", "what": "off"}'; exit 1`), 1,
			prove.Link{Link: "update", Of: "update 2", Verdict: "broken", What: "off"},
		},
		"nothing": {
			say(`no torch here >&2; exit 3`), 1,
			prove.Link{Link: "update", Of: "update 2", Verdict: "unchecked", What: "sh: exit status 3: no torch here"},
		},
		"off": {
			off, 1e-6,
			prove.Link{
				Link: "update", Of: "update 2", Verdict: "unchecked", What: "off; --tolerance 2e-05 would let them pass",
			},
		},
		"near": {
			off, 1e-4,
			prove.Link{Link: "update", Of: "update 2", Verdict: "holds", What: "off; --tolerance 0.0001 lets them pass"},
		},
	} {
		o := options()
		o.Trainer, o.Only, o.Tolerance = of.trainer, []string{"update"}, of.passes
		r := run(t, archive, o)
		if got := r.Links[len(r.Links)-1]; got != of.want || r.Proved != (got.Verdict == prove.Holds) {
			t.Errorf("%s: %+v, proved %t; want %+v", name, got, r.Proved, of.want)
		}
	}
	o := options()
	o.Trainer = []string{"no-such-trainer"}
	_, err := prove.Run(t.Context(), bustest.New(t).Bus, "signs.tar", bytes.NewReader(archive), o)
	if _, ok := errors.AsType[*prove.SettingError](err); !ok {
		t.Errorf("%v", err)
	}
	o.Trainer, o.Version = nil, 9
	_, err = prove.Run(t.Context(), nil, "signs.tar", bytes.NewReader(archive), o)
	if _, ok := errors.AsType[*prove.SettingError](err); !ok || !strings.Contains(err.Error(), "version 9") {
		t.Errorf("%v", err)
	}
}
