package integration_test

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
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

// What deploy/guide/secure-it.md says that roles cannot do: the server sends answers
// anywhere. Once a release of it refuses that, this fails, and the document has good news to tell.
func TestRoles_AnswersGoAnywhere(t *testing.T) {
	t.Parallel()
	g := servers()["nats-server"](t)
	admin, viewer := g.user(t, "admin"), g.user(t, "viewer")
	if _, err := admin.nc.Request("mdr.v1.advantage.a.u", []byte("x"), 10*time.Second); err != nil {
		t.Fatal(err)
	}
	admin.holds(t, "an advantage is stored", "MDR_ADVANTAGES", 1)
	viewer.ask(t, "$JS.API.DIRECT.GET.MDR_ADVANTAGES.mdr.v1.advantage.a.none", "$JS.API.STREAM.PURGE.MDR_ADVANTAGES",
		"")
	admin.holds(t, "a viewer has emptied a stream", "MDR_ADVANTAGES", 0)
}
