package command

import (
	"fmt"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/schemas"
)

// What no service can use is listed, shown and dropped.
func TestDead(t *testing.T) {
	inStore(t)
	conn, err := (&app{store: "meander-data"}).connect(t.Context(), zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	d := &schemas.Dead{
		Stage: "intake", Code: "decode", Reason: "no event\nat all", Run: "r1", UID: "x", OriginalSubject: "mdr.v1.prompt.r1",
		Stream: schemas.StreamPrompts, StreamSeq: 7, Deliveries: 1, At: time.Now().UnixNano(), Data: []byte("why"),
	}
	data, err := schemas.Encode(d)
	if err != nil {
		t.Fatal(err)
	}
	ack, err := conn.PublishRaw(t.Context(), d.Subject(), data, nil, "letter")
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	id := fmt.Sprint(ack.Seq)
	expect(t, exitOK, "no event ...", "dead", "ls")
	lines := linesOf(t, expect(t, exitOK, "", "dead", "ls", "--run", "r1", "--json"))
	if len(lines) != 1 || lines[0]["code"] != "decode" {
		t.Errorf("JSON %v", lines)
	}
	expect(t, exitOK, `"not_msgpack_hex": "776879"`, "dead", "show", id)
	expect(t, exitOK, "dropped "+id, "dead", "drop", id)
	for _, verb := range []string{"show", "replay", "drop"} {
		expect(t, exitUsage, "there is no dead letter "+id+"; 'meander dead ls' lists those there are", "dead", verb, id)
	}
	expect(t, exitUsage, `--run: "a b"`, "dead", "ls", "--run", "a b")
	expect(t, exitUsage, "", "dead", "show", "first")
}
