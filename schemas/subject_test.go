package schemas_test

import (
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/schemas"
)

func TestCheckToken(t *testing.T) {
	for _, token := range []string{"a", "AZaz09_-", strings.Repeat("x", schemas.MaxToken)} {
		if err := schemas.CheckToken("uid", token); err != nil {
			t.Errorf("CheckToken(%q) = %v", token, err)
		}
	}
	for token, named := range map[string]string{
		"": `""`, "a.b": `"a.b"`, "a b": `"a b"`, "*": `"*"`, ">": `">"`, "a\x00": `"a\x00"`,
		strings.Repeat("x", schemas.MaxToken+1): `"` + strings.Repeat("x", schemas.MaxToken) + `"...`,
	} {
		want := "uid: " + named + "; " + tokenRule
		if err := schemas.CheckToken("uid", token); err == nil || err.Error() != want {
			t.Errorf("CheckToken(%q) = %v, want %s", token, err, want)
		}
	}
}

// Every subject reads back as what it was made of, as it is published and as it is stored.
func TestParseSubject(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		token := rapid.StringMatching(`[A-Za-z0-9_-]{1,8}`)
		n := rapid.Int64Range(0, schemas.MaxGroupSize-1)
		run, uid, lane := schemas.Run(token.Draw(t, "run")), schemas.UID(token.Draw(t, "uid")),
			schemas.Lane(token.Draw(t, "lane"))
		batch := token.Draw(t, "batch")
		stage, tenant := schemas.Stage(token.Draw(t, "stage")), schemas.Tenant(token.Draw(t, "tenant"))
		attempt, name := token.Draw(t, "attempt"), token.Draw(t, "name")
		sample, step, part := n.Draw(t, "sample"), n.Draw(t, "step"), n.Draw(t, "part")
		s, k, q := strconv.FormatInt(sample, 10), strconv.FormatInt(step, 10), strconv.FormatInt(part, 10)
		p := strconv.Itoa(schemas.Partition(batch))
		stepSubject := schemas.StepSubject(run, uid, sample, stage, attempt, step)
		for subject, want := range map[string]schemas.Address{
			schemas.PromptSubject(run):     {Kind: schemas.KindPrompt, Run: run},
			schemas.GroupSubject(run, uid): {Kind: schemas.KindGroup, Run: run, UID: uid},
			schemas.ControlSubject(run):    {Kind: schemas.KindControl, Run: run},
			schemas.ParkedSubject(run, lane, uid, sample, stage): {
				Kind: schemas.KindParked, Run: run, Lane: lane, UID: uid, Sample: s, Stage: stage,
			},
			schemas.PlanSubject(run, uid): {Kind: schemas.KindPlan, Run: run, UID: uid},
			schemas.OpeningSubject(run, batch, uid): {
				Kind: schemas.KindOpening, Run: run, Batch: batch, UID: uid,
			},
			schemas.RequestSubject(run, lane, uid, sample, stage): {
				Kind: schemas.KindRequest, Run: run, Lane: lane, UID: uid, Sample: s, Stage: stage,
			},
			stepSubject: {Kind: schemas.KindStep, Run: run, UID: uid, Sample: s, Stage: stage, Attempt: attempt, Step: k},
			schemas.PartSubject(stepSubject, part): {
				Kind: schemas.KindPart, Run: run, UID: uid, Sample: s, Stage: stage, Attempt: attempt, Step: k, Part: q,
			},
			schemas.TrajectorySubject(run, uid, sample, stage): {
				Kind: schemas.KindTrajectory, Run: run, UID: uid, Sample: s, Stage: stage,
			},
			schemas.VerdictSubject(run, uid, sample, name): {
				Kind: schemas.KindVerdict, Run: run, UID: uid, Sample: s, Name: name,
			},
			schemas.RewardSubject(run, batch, uid, sample): {
				Kind: schemas.KindReward, Run: run, Batch: batch, UID: uid, Sample: s,
			},
			schemas.AdvantageSubject(run, uid): {Kind: schemas.KindAdvantage, Run: run, UID: uid},
			schemas.BatchSubject(run, batch):   {Kind: schemas.KindBatch, Run: run, Batch: batch},
			schemas.PolicySubject(lane, tenant): {
				Kind: schemas.KindPolicy, Lane: lane, Tenant: tenant,
			},
			schemas.AppliedSubject(lane, tenant, name): {
				Kind: schemas.KindApplied, Lane: lane, Tenant: tenant, Instance: name,
			},
			schemas.UpdateSubject(run, lane, tenant, name, step): {
				Kind: schemas.KindUpdate, Run: run, Lane: lane, Tenant: tenant, Trainer: name, Step: k,
			},
			(&schemas.Alarm{Run: run, Rule: name}).Subject(): {Kind: schemas.KindAlarm, Run: run, Name: name},
			schemas.DeadSubject("intake", run, uid): {
				Kind: schemas.KindDead, Service: "intake", Run: run, UID: uid,
			},
		} {
			got, ok := schemas.ParseSubject(subject)
			if !ok || got != want {
				t.Fatalf("ParseSubject(%q) = %+v, %v, want %+v", subject, got, ok, want)
			}
			stored := schemas.StoredSubject(subject)
			if want.Kind == schemas.KindReward || want.Kind == schemas.KindOpening {
				want.Partition = p
			}
			if got, ok := schemas.ParseSubject(stored); !ok || got != want || want.Filter() != stored {
				t.Fatalf("ParseSubject(%q) = %+v, %v, want %+v, whose filter is %q", stored, got, ok, want,
					want.Filter())
			}
			if got := schemas.PublishedSubject(stored); got != subject {
				t.Fatalf("PublishedSubject(%q) = %q, want %q", stored, got, subject)
			}
		}
		r := schemas.Reward{Run: run, UID: uid, SampleIndex: sample, Group: schemas.Group{Batch: batch}}
		if !r.StoredUnder(schemas.StoredSubject(r.Subject())) ||
			r.StoredUnder(schemas.RewardSubject(run, batch, uid, sample)+"0") {
			t.Fatalf("StoredUnder of %q", r.Subject())
		}
	})
}

func TestParseSubject_Unknown(t *testing.T) {
	for _, subject := range []string{
		"", "mdr.v1.", "mdr.v1.step", "mdr.v1.step.r.u", "mdr.v1.step.r.u.1.main.a.2.3.4", "mdr.v1.reward.r.b.u", "mdr.v1.reward.1.2.r.b.u.0",
		"mdr.v1.prompt.", "mdr.v1.prompt.a.b", "mdr.v1.group.r.", "mdr.v1.unknown.r", "mdr.v2.prompt.r", "prompt.r",
	} {
		if a, ok := schemas.ParseSubject(subject); ok || a != (schemas.Address{}) {
			t.Errorf("ParseSubject(%q) = %+v, %v", subject, a, ok)
		}
	}
}

func TestAddress_Filter(t *testing.T) {
	for want, got := range map[string]string{
		"mdr.v1.reward.*.r.*.u.*":     schemas.RewardFilter("r", "*", "u"),
		"mdr.v1.reward.5.r.b.*.*":     schemas.RewardFilter("r", "b", "*"),
		"mdr.v1.request.*.l.*.*.*":    schemas.Address{Kind: schemas.KindRequest, Lane: "l"}.Filter(),
		"mdr.v1.step.r.*.*.*.*.*.*":   schemas.Address{Kind: schemas.KindPart, Run: "r"}.Filter(),
		"mdr.v1.trajectory.r.u.*.*":   schemas.TrajectoryFilter("r", "u"),
		"mdr.v1.dead.intake.*.*":      schemas.Address{Kind: schemas.KindDead, Service: "intake"}.Filter(),
		"mdr.v1.*.3.>":                schemas.PartitionFilter(3),
		"$KV.mdr-presence.sampler-1":  schemas.PresenceSubject("sampler-1"),
		"mdr.v1.control.r1":           schemas.ControlSubject("r1"),
		"mdr.v1.parked.r1.l.u.3.main": schemas.ParkedSubject("r1", "l", "u", 3, schemas.StageMain),
	} {
		if got != want {
			t.Errorf("filter %q, want %q", got, want)
		}
	}
}

// Whatever a refused message named, its dead letter has one legal subject.
func TestDeadSubject_hostile(t *testing.T) {
	if got := schemas.DeadSubject("intake", "a.b", ">"); got != "mdr.v1.dead.intake._._" {
		t.Errorf("got %s", got)
	}
	rapid.Check(t, func(t *rapid.T) {
		s := schemas.DeadSubject(rapid.String().Draw(t, "service"), schemas.Run(rapid.String().Draw(t, "run")),
			schemas.UID(rapid.String().Draw(t, "uid")))
		tokens := strings.Split(strings.TrimPrefix(s, schemas.Prefix), ".")
		if len(tokens) != 4 || tokens[0] != "dead" {
			t.Fatalf("subject %q", s)
		}
		for _, token := range tokens {
			if err := schemas.CheckToken("token", token); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// Different events have different subjects: the subject is the idempotency key.
func TestSubjects_areKeys(t *testing.T) {
	type id struct {
		run          schemas.Run
		uid          schemas.UID
		attempt      string
		sample, step int64
	}
	token := rapid.StringMatching(`[A-Za-z0-9_-]{1,3}`)
	draw := rapid.Custom(func(t *rapid.T) id {
		return id{
			schemas.Run(token.Draw(t, "run")), schemas.UID(token.Draw(t, "uid")), token.Draw(t, "attempt"),
			rapid.Int64Range(0, 30).Draw(t, "sample"), rapid.Int64Range(0, 30).Draw(t, "step"),
		}
	})
	subject := func(i id) string {
		return schemas.StepSubject(i.run, i.uid, i.sample, schemas.StageMain, i.attempt, i.step)
	}
	rapid.Check(t, func(t *rapid.T) {
		a, b := draw.Draw(t, "a"), draw.Draw(t, "b")
		if (a == b) != (subject(a) == subject(b)) {
			t.Fatalf("%+v has subject %s, %+v has %s", a, subject(a), b, subject(b))
		}
		if got := schemas.MessageID(subject(a)); schemas.Prefix+got != subject(a) {
			t.Fatalf("message id %s of subject %s", got, subject(a))
		}
	})
}

// Events of the samples travel on a subject of the one stream that stores them.
func TestStreams_storeEveryEvent(t *testing.T) {
	for _, s := range samples(t) {
		k, ok := s.event.(schemas.Keyed)
		if !ok {
			continue
		}
		var stored []string
		for _, stream := range schemas.Streams() {
			for _, filter := range stream.Subjects {
				if covers(filter, k.Subject()) {
					stored = append(stored, stream.Name)
				}
			}
		}
		if len(stored) != 1 {
			t.Errorf("%s: %s is stored by %v, want one stream", s.name, k.Subject(), stored)
		}
	}
}

// covers says whether a NATS subject filter matches subject.
func covers(filter, subject string) bool {
	f, s := strings.Split(filter, "."), strings.Split(subject, ".")
	for i, token := range f {
		if token == ">" {
			return len(s) > i
		}
		if i >= len(s) || token != "*" && token != s[i] {
			return false
		}
	}
	return len(f) == len(s)
}

// The rules that JetStream imposes on a stream's settings.
func TestStreams_settings(t *testing.T) {
	names := map[string]bool{}
	for _, s := range schemas.Streams() {
		if names[s.Name] {
			t.Errorf("%s comes twice", s.Name)
		}
		names[s.Name] = true
		if s.MaxAge != 0 && s.MaxAge < schemas.DedupWindow {
			t.Errorf("%s: max age %v is below the duplicate window %v", s.Name, s.MaxAge, schemas.DedupWindow)
		}
		if s.Guarded && s.WorkQueue {
			t.Errorf("%s: a work queue forgets what was acked, so it cannot guard for ever", s.Name)
		}
		if s.MaxBytes <= 0 {
			t.Errorf("%s is not bounded", s.Name)
		}
		if len(s.Subjects) == 0 || s.Purpose == "" {
			t.Errorf("%s has no subjects or no purpose", s.Name)
		}
	}
}

func TestRunOf(t *testing.T) {
	tests := []struct {
		subject string
		run     schemas.Run
	}{
		{schemas.PromptSubject("r"), "r"},
		{schemas.RequestSubject("r", "lane", "u", 1, schemas.StageMain), "r"},
		{schemas.StepSubject("r", "u", 1, schemas.StageMain, "a", 2), "r"},
		{schemas.PartSubject(schemas.StepSubject("r", "u", 1, schemas.StageMain, "a", 2), 0), "r"},
		{schemas.TrajectorySubject("r", "u", 1, schemas.StageMain), "r"},
		{schemas.RewardSubject("r", "b", "u", 1), "r"},
		{schemas.Prefix + "reward.11.r.b.u.1", "r"}, // as stored, with its partition
		{schemas.AdvantageSubject("r", "u"), "r"},
		{schemas.BatchSubject("r", "b"), "r"},
		{schemas.DeadSubject("intake", "r", "u"), "r"},
		{schemas.PolicySubject("lane", schemas.TenantMain), ""},
		{"mdr.v2.prompt.r", ""},
		{schemas.Prefix, ""},
		{"", ""},
	}
	for _, tt := range tests {
		if run, ok := schemas.RunOf(tt.subject); run != tt.run || ok != (tt.run != "") {
			t.Errorf("RunOf(%q) = %q, %v, want %q", tt.subject, run, ok, tt.run)
		}
	}
}

func TestIsPart(t *testing.T) {
	step := schemas.StepSubject("r", "u", 1, schemas.StageMain, "a", 2)
	for subject, want := range map[string]bool{
		step: false, schemas.PartSubject(step, 0): true, schemas.RequestSubject("r", "l", "u", 0, schemas.StageMain): false, "": false,
	} {
		if got := schemas.IsPart(subject); got != want {
			t.Errorf("IsPart(%q) = %v, want %v", subject, got, want)
		}
	}
}
