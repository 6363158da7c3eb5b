package schemas_test

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/schemas"
)

func TestCheckToken(t *testing.T) {
	tests := []struct {
		token string
		want  string
	}{
		{"a", ""},
		{"AZaz09_-", ""},
		{strings.Repeat("x", schemas.MaxToken), ""},
		{"", "uid: empty; needs 1 to 64 characters of A-Z a-z 0-9 _ -"},
		{strings.Repeat("x", schemas.MaxToken+1), "uid: 65 characters; needs 1 to 64 of A-Z a-z 0-9 _ -"},
		{"a.b", `uid: "a.b" has the character '.'; needs 1 to 64 characters of A-Z a-z 0-9 _ -`},
		{"a b", `uid: "a b" has the character ' '; needs 1 to 64 characters of A-Z a-z 0-9 _ -`},
		{"*", `uid: "*" has the character '*'; needs 1 to 64 characters of A-Z a-z 0-9 _ -`},
		{">", `uid: ">" has the character '>'; needs 1 to 64 characters of A-Z a-z 0-9 _ -`},
		{"a\x00", `uid: "a\x00" has the character '\x00'; needs 1 to 64 characters of A-Z a-z 0-9 _ -`},
	}
	for _, tt := range tests {
		got := ""
		if err := schemas.CheckToken("uid", tt.token); err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("CheckToken(%q) = %q, want %q", tt.token, got, tt.want)
		}
	}
}

// Whatever a refused message named, its dead letter has one legal subject.
func TestDeadSubject_hostile(t *testing.T) {
	if got := schemas.DeadSubject("intake", "a.b", ">"); got != "mdr.v1.dead.intake._._" {
		t.Errorf("got %s", got)
	}
	rapid.Check(t, func(t *rapid.T) {
		s := schemas.DeadSubject(rapid.String().Draw(t, "stage"), rapid.String().Draw(t, "run"), rapid.String().Draw(t, "uid"))
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
		run, uid, attempt string
		sample, step      int64
	}
	token := rapid.StringMatching(`[A-Za-z0-9_-]{1,3}`)
	draw := rapid.Custom(func(t *rapid.T) id {
		return id{
			token.Draw(t, "run"), token.Draw(t, "uid"), token.Draw(t, "attempt"),
			rapid.Int64Range(0, 30).Draw(t, "sample"), rapid.Int64Range(0, 30).Draw(t, "step"),
		}
	})
	subject := func(i id) string { return schemas.StepSubject(i.run, i.uid, i.sample, i.attempt, i.step) }
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
		subject, run string
	}{
		{schemas.PromptSubject("r"), "r"},
		{schemas.RequestSubject("r", "lane", "u", 1), "r"},
		{schemas.StepSubject("r", "u", 1, "a", 2), "r"},
		{schemas.PartSubject(schemas.StepSubject("r", "u", 1, "a", 2), 0), "r"},
		{schemas.TrajectorySubject("r", "u", 1), "r"},
		{schemas.RewardSubject("r", "b", "u", 1), "r"},
		{schemas.Prefix + "reward.11.r.b.u.1", "r"}, // as stored, with its partition
		{schemas.AdvantageSubject("r", "u"), "r"},
		{schemas.BatchSubject("r", "b"), "r"},
		{schemas.DeadSubject("intake", "r", "u"), "r"},
		{schemas.PolicySubject("lane"), ""},
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
	step := schemas.StepSubject("r", "u", 1, "a", 2)
	for subject, want := range map[string]bool{
		step: false, schemas.PartSubject(step, 0): true, schemas.RequestSubject("r", "l", "u", 0): false, "": false,
	} {
		if got := schemas.IsPart(subject); got != want {
			t.Errorf("IsPart(%q) = %v, want %v", subject, got, want)
		}
	}
}
