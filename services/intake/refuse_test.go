package intake

import (
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/schemas"
)

// dry asks what would become of a prompt.
func (p *plane) dry(t testing.TB, run schemas.Run, asked *schemas.Prompt) *schemas.Receipt {
	t.Helper()
	r := &schemas.Receipt{}
	bustest.Until(t, "an answer", func() error {
		m, err := p.Conn().RequestWithContext(t.Context(), schemas.DrySubject(run), bustest.Encode(t, asked))
		if err == nil {
			*r = schemas.Receipt{}
			err = schemas.Decode(m.Data, r)
		}
		if err == nil && r.Waiting != "" { // the sampler is not seen yet
			err = errors.New(r.Waiting)
		}
		return err
	})
	return r
}

// sameWords compares two errors but for their numbers: a deadline, or the place of a prompt in its stream.
func sameWords(a, b string) bool {
	words := func(s string) string {
		return strings.Trim(strings.Map(func(r rune) rune {
			if r >= '0' && r <= '9' {
				return -1
			}
			return r
		}, s), " ")
	}
	return words(a) == words(b)
}

// Asked dry, a prompt is accepted with what its receipt would say, and nothing is stored of it: not even its images.
func TestDry_StoresNothing(t *testing.T) {
	p := newPlane(t)
	p.serve(t)
	asked := prompt("u", "a red fox", func(p *schemas.Prompt) {
		p.Start = &schemas.Start{StepIndex: new(int64(1)), Latents: &schemas.Tensor{
			DType: "F32", Shape: []int64{1, 16, 64}, Data: make([]byte, 4*16*64),
		}}
		p.Height, p.Width = new(int64(64)), new(int64(64))
	})
	dry := p.dry(t, "r", asked)
	if !dry.Accepted || dry.UID != "u" || dry.Samples != 4 {
		t.Fatalf("%+v", dry)
	}
	for _, s := range schemas.StreamNames() {
		if n := p.Info(t, s).State.Msgs; n > 0 && s != schemas.StreamPolicies &&
			(strings.HasPrefix(s, "MDR_") || s == schemas.StreamBlobBucket) {
			t.Errorf("%s has %d messages", s, n)
		}
	}
	if r := receipt(t, p.publish(t, "r", asked)); !reflect.DeepEqual(r, dry) {
		t.Errorf("published it is %+v, asked dry %+v", r, dry)
	}
}

// record is the stored record of a group, which must be open where its rewards come.
func (p *plane) record(t testing.TB, run schemas.Run, uid schemas.UID) *schemas.GroupRecord {
	t.Helper()
	g := &schemas.GroupRecord{}
	if _, err := p.StoredEvent(t.Context(), schemas.StreamGroups, schemas.GroupSubject(run, uid), g, nil); err != nil {
		t.Fatal(err)
	}
	o := &schemas.Opening{}
	if _, err := p.StoredEvent(t.Context(), schemas.StreamRewards,
		schemas.StoredSubject((*schemas.Opening)(g).Subject()),
		o, nil); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual((*schemas.GroupRecord)(o), g) {
		t.Errorf("%s: opened as %+v, the record is %+v", uid, o, g)
	}
	return g
}

// A refused prompt has a group, which says so, with a batch and without; its uid is used. A dry request gets the same
// answer before, and stores nothing.
func TestRefuse_Record(t *testing.T) {
	p := newPlane(t)
	p.serve(t)
	for _, c := range []struct {
		uid     schemas.UID
		change  func(*schemas.Prompt)
		code    string
		reason  string
		size    int64
		batch   string
		waiting bool // the batch waits for it
	}{
		{
			"alone", func(p *schemas.Prompt) { p.Height = new(int64(80 * 1024)) }, schemas.CodeInvalid,
			"height: 81920;", 4, "alone", false,
		},
		{
			"resolved", func(p *schemas.Prompt) { p.Height = new(int64(17)) }, schemas.CodeInvalid, "height: 17;", 4,
			"resolved", false,
		},
		{
			"model", func(p *schemas.Prompt) { p.Model = "nobody" }, schemas.CodeUnknownModel,
			`model: "nobody" is not served`, 4, "model", false,
		},
		{
			"size", func(p *schemas.Prompt) { p.GroupSize = new(int64(0)) }, schemas.CodeInvalid, "group_size: 0;", 1,
			"size", false,
		},
		{"place", func(p *schemas.Prompt) {
			p.Reward, p.Batch = []schemas.RewardSpec{{Name: "no_such"}}, &schemas.BatchSpec{ID: "b", Groups: 2}
		}, schemas.CodeInvalid, "reward[0]", 4, "b", true},
		{
			"nowhere", func(p *schemas.Prompt) { p.Batch = &schemas.BatchSpec{ID: "a.b", Groups: 2} },
			schemas.CodeInvalid, "batch.id", 4, "nowhere", false,
		},
		{
			"past", func(p *schemas.Prompt) { p.Deadline = new(time.Now().Add(-time.Hour).UnixNano()) },
			schemas.CodeLate, "is over", 4, "past", false,
		},
	} {
		ask := func(change func(*schemas.Prompt)) *schemas.Receipt {
			asked := prompt(c.uid, `a sign that says "fox"`, change)
			dry := p.dry(t, "r", asked)
			r := receipt(t, p.publish(t, "r", asked))
			if dry.Accepted != r.Accepted || dry.Code != r.Code || !sameWords(dry.Error, r.Error) || dry.UID != r.UID {
				t.Errorf("%s: asked dry it is %+v, published %+v", c.uid, dry, r)
			}
			return r
		}
		r := ask(c.change)
		if r.Accepted || r.Code != c.code || !strings.Contains(r.Error, c.reason) || r.UID != c.uid {
			t.Errorf("%s: %+v", c.uid, r)
		}
		g := p.record(t, "r", c.uid)
		if g.Error != r.Error || g.GroupSize != c.size || g.Group.Batch != c.batch ||
			(g.Group.BatchGroups > 0) != c.waiting {
			t.Errorf("%s: %+v", c.uid, g)
		}
		if r := ask(c.change); r.Accepted || r.Code != c.code && r.Code != schemas.CodeUIDConflict {
			t.Errorf("%s again: %+v", c.uid, r)
		}
		if r := ask(nil); r.Code != schemas.CodeUIDConflict ||
			!strings.Contains(r.Error, string(`uid: "`+c.uid+`" of run "r" has its result, a refusal (`)) {
			t.Errorf("%s, corrected: %+v", c.uid, r)
		}
	}
	named := receipt(t, p.publish(t, "r", &schemas.Prompt{Prompt: "x", GroupSize: new(int64(0))}))
	if named.UID == "" || p.record(t, "r", named.UID).Error != named.Error {
		t.Errorf("refused without a uid: %+v", named)
	}
	if n := len(p.requests(t, "r")); n != 0 {
		t.Errorf("%d groups have requests", n)
	}
}

// A refused prompt without a uid has that of its group in its dead letter, so that each is counted once.
func TestRefuse_Unnamed(t *testing.T) {
	p := newPlane(t)
	p.serve(t)
	r := receipt(t, p.publish(t, "r", prompt("", "a fox", func(p *schemas.Prompt) { p.Height = new(int64(17)) })))
	if d := bustest.Dead(t, p.Bus, 1)[0]; d.UID == "" || d.UID != r.UID || p.record(t, "r", d.UID).Error != r.Error {
		t.Errorf("dead letter of uid %q; want that of the receipt, %q", d.UID, r.UID)
	}
	if of, err := counters.Look(t.Context(), p.Bus, "r"); err != nil || of["r"].Refused() != 0 {
		t.Errorf("%+v, %v; want no letter without a group", of["r"], err)
	}
}

// A prompt of a uid that is another's leaves that one's group alone.
func TestRefuse_OtherUID(t *testing.T) {
	p := newPlane(t)
	p.serve(t)
	if r := receipt(t, p.publish(t, "r", prompt("u", "a red fox", nil))); !r.Accepted {
		t.Fatal(r.Error)
	}
	receipt(t, p.publish(t, "r", prompt("u", "a red fox", func(p *schemas.Prompt) { p.Height = new(int64(100)) })))
	if g := p.record(t, "r", "u"); g.Error != "" {
		t.Errorf("%+v", g)
	}
	if rewards, err := p.Subjects(t.Context(), schemas.StreamRewards,
		schemas.RewardFilter("r", "u", "u")); err != nil || len(rewards) != 0 {
		t.Errorf("%d rewards, %v", len(rewards), err)
	}
}

// A prompt that was accepted and cannot go on gives its samples up: here the defaults have
// changed since an intake claimed the uid and died.
func TestRefuse_Abandoned(t *testing.T) {
	p := newPlane(t)
	p.publish(t, "r", prompt("u", "a red fox", nil))
	m, err := p.Newest(t.Context(), schemas.StreamPrompts)
	if err != nil {
		t.Fatal(err)
	}
	rs, err := Resolve("r", prompt("u", "a red fox", nil), qwen(),
		Origin{Seq: m.Seq, Created: m.Time, Reward: []string{"synthetic"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := (&service{bus: p.Bus}).claim(t.Context(),
		&asked{requests: rs, policies: []*schemas.Policy{qwen()}}); err != nil {
		t.Fatal(err)
	}
	p.serve(t)
	for _, m := range bustest.Await(t, p.Bus, 4, schemas.StreamRewards, schemas.RewardFilter("r", "u", "u")) {
		r := bustest.Decode[schemas.Reward](t, m)
		if r.Status != schemas.StatusFailed ||
			!strings.Contains(r.Error, "reward: changed since the uid was claimed") || r.GroupSize != 4 {
			t.Errorf("%+v", r)
		}
	}
}

// A prompt waits for a sampler no longer than its deadline.
func TestRefuse_NoSampler(t *testing.T) {
	p := &plane{bustest.New(t)}
	p.serve(t)
	r := receipt(t, p.publish(t, "r", prompt("u", "a red fox",
		func(p *schemas.Prompt) { p.Deadline = new(time.Now().Add(time.Second).UnixNano()) })))
	if r.Code != schemas.CodeLate || !strings.Contains(r.Error, "no sampler runs; start one") || p.record(t, "r", "u").
		Error != r.Error {
		t.Errorf("%+v", r)
	}
}

// A lane whose entry in the bucket of policies is lost is served all the same: the history has its policy.
func TestRefuse_NotALostPolicy(t *testing.T) {
	p := newPlane(t)
	kv, err := p.JetStream().KeyValue(t.Context(), schemas.PolicyBucket)
	if err == nil {
		err = kv.Purge(t.Context(), schemas.PolicyKey(qwen().Lane, schemas.TenantMain))
	}
	if err != nil {
		t.Fatal(err)
	}
	p.serve(t)
	if r := receipt(t, p.publish(t, "r", prompt("u", "a red fox", nil))); !r.Accepted {
		t.Errorf("%+v", r)
	}
}

// A field that no prompt has is refused with what was probably meant, or, where the prompt
// says so, taken with a warning.
func TestUnknownFields(t *testing.T) {
	p := newPlane(t)
	p.serve(t)
	encode := msgpack.Marshal
	ask := func(prompt map[string]any) *schemas.Receipt {
		inbox := p.Conn().NewInbox()
		answers, err := p.Conn().SubscribeSync(inbox)
		if err != nil {
			t.Fatal(err)
		}
		data, err := encode(prompt)
		isJSON := strings.HasPrefix(string(data), "{")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.PublishPrompt(t.Context(), "r", data, nats.Header{schemas.HeaderReply: {inbox}}); err != nil {
			t.Fatal(err)
		}
		m, err := answers.NextMsg(bustest.Patience)
		if err != nil || json.Valid(m.Data) != isJSON {
			t.Fatalf("published in JSON: %v, receipt %+v, %v", isJSON, m, err)
		}
		dry, err := p.Conn().RequestWithContext(t.Context(), schemas.DrySubject("r"), data)
		if err != nil || json.Valid(dry.Data) != isJSON {
			t.Fatalf("asked in JSON: %v, answered %+v, %v", isJSON, dry, err)
		}
		return decoded(t, m.Data)
	}
	r := ask(map[string]any{"uid": "u", "prompt": "x", "gruop_size": 4, "rollout": map[string]any{"noise_lvel": .5}})
	if r.Code != schemas.CodeInvalid || !strings.Contains(r.Error,
		"gruop_size: unknown field; did you mean group_size?") ||
		!strings.Contains(r.Error, "rollout.noise_lvel: unknown field; did you mean noise_level?") ||
		p.record(t, "r", "u").Error != r.Error {
		t.Errorf("%+v", r)
	}
	r = ask(map[string]any{"uid": "v", "prompt": "x", "gruop_size": 4, "unknown_fields": "warn"})
	if !r.Accepted || r.Samples != 8 || !slices.Equal(r.Warnings,
		[]string{"gruop_size: unknown field; did you mean group_size?"}) {
		t.Errorf("%+v", r)
	}
	if r = ask(map[string]any{"prompt": "x", "unknown_fields": "maybe"}); r.Accepted ||
		!strings.Contains(r.Error, "unknown_fields: \"maybe\"; must be one of refuse, warn") {
		t.Errorf("%+v", r)
	}
	digest := strings.Repeat("0", 64)
	condition := map[string]any{"name": "image", "type": "image", "ref": map[string]any{
		"bucket": schemas.BlobBucket, "digest": digest, "size": 1,
	}}
	if r = ask(map[string]any{"uid": "c", "prompt": "x", "conditions": []any{condition}}); r.Accepted ||
		!strings.Contains(r.Error, "conditions: image; must be absent") {
		t.Errorf("%+v", r)
	}
	claimed := map[string]any{"uid": "j", "prompt": "x", "group_size": 3, "seed": 1 << 62, "true_cfg_scale": 1.1}
	if r = ask(claimed); !r.Accepted {
		t.Errorf("%+v", r)
	}
	encode = json.Marshal // which is taken, and refused, in the same way
	if r = ask(claimed); !r.Accepted || r.Samples != 3 {
		t.Errorf("the same prompt in JSON is not the one that has the uid: %+v", r)
	}
	if r = ask(map[string]any{"uid": "j", "prompt": "y"}); r.Accepted || !strings.Contains(r.Error, "uid") {
		t.Errorf("another prompt in JSON: %+v", r)
	}
	if r = ask(map[string]any{"uid": "w", "prompt": "x", "group_size": 3}); !r.Accepted || r.Samples != 3 {
		t.Errorf("%+v", r)
	}
	if r = ask(map[string]any{"uid": "z", "prompt": "x", "gruop_size": 4}); r.Code != schemas.CodeInvalid ||
		!strings.Contains(r.Error, "gruop_size: unknown field; did you mean group_size?") {
		t.Errorf("%+v", r)
	}
}
