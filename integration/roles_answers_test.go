package integration_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// streamState is what there is of a stream.
type streamState struct {
	Messages uint64
	LastSeq  uint64            `json:"last_seq"`
	Subjects map[string]uint64 `json:"subjects"`
}

// state asks for that of a stream; nil: there is none.
func (u *user) state(t *testing.T, stream string) *streamState {
	t.Helper()
	m, err := u.nc.Request("$JS.API.STREAM.INFO."+stream, []byte(`{"subjects_filter":">"}`), 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var info struct {
		Error *struct{ Code int }
		State streamState
	}
	if err := json.Unmarshal(m.Data, &info); err != nil {
		t.Fatal(err)
	}
	if info.Error != nil {
		return nil
	}
	return &info.State
}

// holds waits until a stream has so many messages.
func (u *user) holds(t *testing.T, what, stream string, want uint64) {
	t.Helper()
	bustest.Until(t, what, func() error {
		if s := u.state(t, stream); s == nil || s.Messages != want {
			return fmt.Errorf("%s: %+v, want %d messages", stream, s, want)
		}
		return nil
	})
}

func (u *user) ask(t *testing.T, subject, answer, body string) {
	t.Helper()
	if err := u.nc.PublishRequest(subject, answer, []byte(body)); err != nil {
		t.Fatal(err)
	}
}

// What deploy/guide/secure-it.md says that roles cannot do to users of all runs: the server sends answers
// anywhere. Once a release of it refuses that, this fails, and the document has good news to tell.
func TestRoles_AnswersGoAnywhere(t *testing.T) {
	t.Parallel()
	g := servers()["nats-server"](t)
	admin, viewer := g.user(t, "admin"), g.user(t, "viewer")
	if _, err := admin.nc.Request("mdr.v1.advantage.a.u", []byte("x"), 10*time.Second); err != nil {
		t.Fatal(err)
	}
	admin.holds(t, "an advantage is stored", "MDR_ADVANTAGES", 1)
	viewer.ask(t, "$JS.API.DIRECT.GET.MDR_ADVANTAGES.mdr.v1.advantage.a.none", "$JS.API.STREAM.PURGE.MDR_ADVANTAGES", "")
	admin.holds(t, "a viewer has emptied a stream", "MDR_ADVANTAGES", 0)
}

// A guest's answers, and what his consumers read, stay in his account, whatever he names for them: of
// what others have, nothing is stored, emptied, deleted or acknowledged. He reads what is of his
// runs, and of others nothing.
func TestRoles_Guests(t *testing.T) {
	t.Parallel()
	for name, serve := range servers() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := serve(t)
			admin := g.user(t, "admin")
			for _, subject := range []string{
				"mdr.v1.advantage.a.u", "mdr.v1.advantage.b.u", "mdr.v1.applied.lane.x",
				"$KV.mdr-runs.b",
			} {
				if _, err := admin.nc.Request(subject, []byte("of others"), 10*time.Second); err != nil {
					t.Fatal(err)
				}
			}
			if name == "up" {
				admin.holds(t, "the sampler has said what it serves", "MDR_POLICIES", 1)
			}
			// A user who guesses the name of a consumer could change it.
			names, err := admin.nc.Request("$JS.API.CONSUMER.NAMES.MDR_ADVANTAGES", nil, 10*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			for _, guest := range []string{"trainer-a", "viewer-a"} {
				if !regexp.MustCompile(`"guest-` + guest + `-[A-Z2-7]{26}"`).Match(names.Data) {
					t.Errorf("what the copies of %s are delivered by has a name to be guessed: %s", guest, names.Data)
				}
				u := g.user(t, guest)
				u.holds(t, guest+" has what is of its run", "MDR_ADVANTAGES", 1)
				if s := u.state(t, "MDR_ADVANTAGES"); s.Subjects["mdr.v1.advantage.a.u"] != 1 {
					t.Errorf("%s reads %v", guest, s.Subjects)
				}
				before := pipelineState(t, admin)
				g.steers(t, u, guest)
				if after := pipelineState(t, admin); !maps.EqualFunc(before, after, func(x, y streamState) bool {
					return x.Messages == y.Messages && x.LastSeq == y.LastSeq && maps.Equal(x.Subjects, y.Subjects)
				}) {
					t.Errorf("after what %s steered:\n%v\nbefore:\n%v", guest, after, before)
				}
			}
			g.receipts(t, admin)
			// Where they lead is steered, too: what he may write is stored.
			u, prompts := g.user(t, "trainer-a"), admin.state(t, "MDR_PROMPTS").LastSeq
			u.ask(t, "$JS.API.DIRECT.GET.KV_mdr-runs.$KV.mdr-runs.a", "mdr.v1.prompt.a", "")
			bustest.Until(t, "an answer is a prompt of his own run", func() error {
				if got := admin.state(t, "MDR_PROMPTS").LastSeq; got != prompts+1 {
					return fmt.Errorf("%d, want %d", got, prompts+1)
				}
				return nil
			})
		})
	}
}

// receipts has intake's answers sent: guests hear what is sent to their own inboxes.
func (g guarded) receipts(t *testing.T, admin *user) {
	t.Helper()
	for _, guest := range []string{"trainer-a", "viewer-a"} {
		u := g.user(t, guest)
		inbox := u.nc.NewInbox()
		heard, err := u.nc.SubscribeSync(inbox)
		if err = errors.Join(err, u.nc.Flush(), admin.nc.Publish(inbox, []byte("accepted"))); err != nil {
			t.Fatal(err)
		}
		if m, err := heard.NextMsg(bustest.Patience); err != nil || string(m.Data) != "accepted" {
			t.Errorf("%s heard %v, %v", guest, m, err)
		}
	}
}

// pipelineState is that of the streams, without what a guest may write and what becomes of it.
func pipelineState(t *testing.T, admin *user) map[string]streamState {
	t.Helper()
	out := map[string]streamState{}
	for _, stream := range []string{
		"MDR_GROUPS", "MDR_REQUESTS", "MDR_STEPS", "MDR_TRAJECTORIES", "MDR_VERDICTS", "MDR_REWARDS", "MDR_ADVANTAGES",
		"MDR_POLICIES",
		"MDR_APPLIED", "MDR_CONTROL", "MDR_PARKED", "MDR_PROMPTS", "MDR_DEAD", "KV_mdr-runs", "KV_mdr-policy", "KV_mdr-seal",
	} {
		s := admin.state(t, stream)
		if s == nil {
			t.Errorf("%s is gone", stream)
			continue
		}
		switch stream {
		case "MDR_DEAD": // of prompts that are none
			*s = streamState{}
		case "MDR_PROMPTS", "KV_mdr-runs":
			maps.DeleteFunc(s.Subjects, func(subject string, _ uint64) bool {
				return subject == schemas.PromptSubject("a") || subject == "$KV.mdr-runs.a"
			})
			*s = streamState{Subjects: s.Subjects}
		}
		out[stream] = *s
	}
	return out
}

// steers has a guest name subjects of others for what the server sends.
func (g guarded) steers(t *testing.T, u *user, guest string) {
	t.Helper()
	targets := []string{
		"mdr.v1.reward.b.u.u.0", "mdr.v1.prompt.b", "mdr.v1.control.b", "mdr.v1.step.b.u.0.t.0", "$KV.mdr-runs.b",
		"pipeline.API.$KV.mdr-runs.b", "$KV.mdr-policy.lane",
		"$JS.API.STREAM.PURGE.MDR_APPLIED", "$JS.API.STREAM.DELETE.MDR_APPLIED",
		"guest." + guest + ".API.STREAM.DELETE.MDR_APPLIED", "guest.viewer-a.API.STREAM.PURGE.MDR_STEPS",
		"pipeline.API.STREAM.PURGE.MDR_APPLIED", "pipeline.API.STREAM.DELETE.MDR_APPLIED",
		"pipeline.API.CONSUMER.DELETE.MDR_VERDICTS.guest-" + guest, "pipeline.API.CONSUMER.RESET.MDR_TRAJECTORIES.reward",
	}
	if guest == "trainer-a" {
		rollup := &nats.Msg{Subject: "$KV.mdr-runs.a", Data: []byte("forged"), Header: nats.Header{"Nats-Rollup": {"all"}}}
		m, err := u.nc.RequestMsg(rollup, 10*time.Second)
		_, err2 := u.nc.Request("$KV.mdr-runs.a", []byte("forged"), 10*time.Second)
		if err := errors.Join(err, err2); err != nil || !json.Valid(m.Data) {
			t.Fatal(err)
		}
		bustest.Until(t, "the spec is in the copy", func() error {
			if s := u.state(t, "KV_mdr-runs"); s.Subjects["$KV.mdr-runs.a"] == 0 {
				return fmt.Errorf("%v", s.Subjects)
			}
			return nil
		})
	}
	for i, target := range targets {
		// the answer is empty, as a request may be
		u.ask(t, "$JS.API.DIRECT.GET.MDR_ADVANTAGES.mdr.v1.advantage.a.none", target, "")
		u.ask(t, "$JS.API.DIRECT.GET.MDR_ADVANTAGES.mdr.v1.advantage.a.u", target, "")
		u.ask(t, "$JS.API.DIRECT.GET.KV_mdr-runs.$KV.mdr-runs.a", target, "")
		name := fmt.Sprintf("s%d", i)
		u.ask(t, "$JS.API.CONSUMER.CREATE.MDR_ADVANTAGES."+name, u.nc.NewInbox(),
			`{"stream_name":"MDR_ADVANTAGES","config":{"name":"`+name+`","ack_policy":"none","deliver_subject":"`+target+`"}}`)
	}
	u.ask(t, "$JS.API.DIRECT.GET.MDR_ADVANTAGES.mdr.v1.advantage.a.none", "$JS.API.STREAM.PURGE.MDR_ADVANTAGES", "")
	u.holds(t, guest+" has emptied its own copy", "MDR_ADVANTAGES", 0) // after all the others
}
