package command

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
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
		Service: "intake", Code: "decode", Reason: "no event\nat all", Run: "r1", UID: "x", OriginalSubject: "mdr.v1.prompt.r1",
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
	// One that cannot be read hides none of the others, nor does one that is as large as can be.
	if _, err := conn.PublishRaw(t.Context(), schemas.DeadSubject("intake", "r2", "u1"), []byte("junk"), nil,
		""); err != nil {
		t.Fatal(err)
	}
	large := bytes.Repeat([]byte("x"), 1000<<10)
	m := &bus.Message{Subject: schemas.PromptSubject("r2"), Data: large, Stream: schemas.StreamPrompts, Seq: 91}
	if err := conn.Dead(t.Context(), "intake", schemas.CodeDecode, "too long", m); err != nil {
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
		expect(t, exitUsage, "there is no dead letter "+id+"; 'meander dead ls' lists them", "dead", verb, id)
	}
	junk, whole := fmt.Sprint(ack.Seq+1), fmt.Sprint(ack.Seq+2)
	if listed := expect(t, exitOK, "too long", "dead", "ls"); strings.Count(listed, "unreadable") != 1 {
		t.Errorf("dead ls:\n%s", listed)
	}
	expect(t, exitOK, "unreadable", "dead", "show", junk)
	expect(t, exitOK, fmt.Sprintf("original, %d bytes", len(large)), "dead", "show", whole)
	expect(t, exitFailed, "", "dead", "replay", junk)
	expect(t, exitOK, "", "dead", "replay", whole)
	expect(t, exitOK, "dropped "+junk, "dead", "drop", junk)
	if left := linesOf(t, expect(t, exitOK, "", "dead", "ls", "--json")); len(left) != 0 {
		t.Errorf("letters left: %v", left)
	}
	if prompts := expect(t, exitOK, "", "watch", "--run", "r2", "--all", "--kinds", "prompt", "--count", "1",
		"--json"); !strings.Contains(prompts, "r2") {
		t.Errorf("replayed: %s", prompts)
	}
	expect(t, exitUsage, `--run: "a b"`, "dead", "ls", "--run", "a b")
	expect(t, exitUsage, "", "dead", "show", "first")
}

// An event in either encoding is printed as one line of JSON; what is no event is an error.
func TestDecode(t *testing.T) {
	event, err := schemas.Encode(&schemas.Prompt{Prompt: "a red fox"})
	if err != nil {
		t.Fatal(err)
	}
	for _, of := range []struct{ in, out, err string }{
		{string(event), `"prompt":"a red fox"`, ""},
		{` {"prompt": "a red fox"}`, `{"prompt":"a red fox"}`, ""},
		{"a red fox", "", `starts with the text "a red fox"; must be a map of msgpack, or JSON`},
		{"", "", "empty"},
	} {
		var out, errs strings.Builder
		code := Execute(t.Context(), []string{"decode"}, strings.NewReader(of.in), &out, &errs)
		if (code == exitOK) != (of.err == "") || !strings.Contains(out.String(), of.out) ||
			!strings.Contains(errs.String(), of.err) {
			t.Errorf("%q: %d, %q, %q", of.in, code, out.String(), errs.String())
		}
	}
}
