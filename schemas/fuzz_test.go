package schemas_test

import (
	"bytes"
	"fmt"
	"io"
	"reflect"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/schemas"
)

// What Precheck accepts, a general decoder reads to the end.
func FuzzPrecheck(f *testing.F) {
	for _, s := range samples(f) {
		f.Add(encoded(f, s.event))
	}
	for _, h := range hostile {
		if len(h.data) < 1<<16 { // the fuzzer would copy the large ones for ever
			f.Add([]byte(h.data))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if schemas.Precheck(data) != nil {
			return
		}
		dec := msgpack.NewDecoder(bytes.NewReader(data))
		if _, err := dec.DecodeMap(); err != nil {
			t.Fatalf("general decoder: %v", err)
		}
		if rest, err := io.ReadAll(dec.Buffered()); err != nil || len(rest) > 0 {
			t.Fatalf("%d bytes left, %v", len(rest), err)
		}
	})
}

func FuzzDecodePrompt(f *testing.F)     { fuzzDecode[schemas.Prompt](f) }
func FuzzDecodeRequest(f *testing.F)    { fuzzDecode[schemas.Request](f) }
func FuzzDecodeStep(f *testing.F)       { fuzzDecode[schemas.Step](f) }
func FuzzDecodeTrajectory(f *testing.F) { fuzzDecode[schemas.Trajectory](f) }
func FuzzDecodeReward(f *testing.F)     { fuzzDecode[schemas.Reward](f) }
func FuzzDecodeAdvantage(f *testing.F)  { fuzzDecode[schemas.Advantage](f) }
func FuzzDecodeBatch(f *testing.F)      { fuzzDecode[schemas.Batch](f) }
func FuzzDecodePolicy(f *testing.F)     { fuzzDecode[schemas.Policy](f) }
func FuzzDecodeApplied(f *testing.F)    { fuzzDecode[schemas.Applied](f) }
func FuzzDecodePresence(f *testing.F)   { fuzzDecode[schemas.Presence](f) }
func FuzzDecodeControl(f *testing.F)    { fuzzDecode[schemas.Control](f) }
func FuzzDecodeDead(f *testing.F)       { fuzzDecode[schemas.Dead](f) }
func FuzzDecodeScoreReply(f *testing.F) { fuzzDecode[schemas.ScoreReply](f) }
func FuzzDecodeReceipt(f *testing.F)    { fuzzDecode[schemas.Receipt](f) }

// What a decoder has seen before makes no difference to what it reads.
func FuzzGroupDecoder(f *testing.F) {
	var events [][]byte
	for _, s := range samples(f) {
		switch s.event.(type) {
		case *schemas.Reward, *schemas.GroupRecord:
			events = append(events, encoded(f, s.event))
		}
	}
	for i, before := range events {
		f.Add(before, before)
		f.Add(before, before[:len(before)/2])
		f.Add(before, events[(i+1)%len(events)])
		f.Add(before[:len(before)-1], before)
	}
	f.Add(events[0], []byte(" "))
	f.Add(events[0], []byte(`{"v":1,"uid":"u"}`))
	f.Fuzz(func(t *testing.T, before, data []byte) {
		var d schemas.GroupDecoder
		_, _ = d.Reward(before, &schemas.Reward{}), d.Opening(before, &schemas.Opening{})
		for range 2 {
			asAlone(t, data, &schemas.Reward{}, &schemas.Reward{}, d.Reward)
			asAlone(t, data, &schemas.Opening{}, &schemas.Opening{}, d.Opening)
		}
	})
}

// asAlone checks that decode reads what DecodeValid does.
func asAlone[E schemas.Event](t *testing.T, data []byte, shared, plain E, decode func([]byte, E) error) {
	t.Helper()
	if got, want := decode(data, shared), schemas.DecodeValid(data, plain); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("%v; alone %v", got, want)
	}
	// DeepEqual tells NaN from NaN
	if !reflect.DeepEqual(shared, plain) && !bytes.Equal(encoded(t, shared), encoded(t, plain)) {
		t.Fatalf("%+v\nalone %+v", shared, plain)
	}
}

// fuzzDecode decodes hostile bytes into one type. Nothing may panic. What decodes
// must read the same from its own encoding, and what is valid must have one, and be
// what the JSON Schema describes.
func fuzzDecode[T any, P interface {
	*T
	schemas.Event
}](f *testing.F,
) {
	for _, s := range samples(f) {
		if _, ok := s.event.(P); ok {
			f.Add(encoded(f, s.event))
		}
	}
	for _, h := range hostile {
		if len(h.data) < 1<<12 {
			f.Add([]byte(h.data))
		}
	}
	f.Add([]byte("\x80"))
	data, ok := schemas.JSONSchema(P(new(T)).Type())
	if !ok {
		f.Fatal("no JSON Schema")
	}
	schema := compile(f, data)
	f.Fuzz(func(t *testing.T, data []byte) {
		var e T
		if err := schemas.Decode(data, P(&e)); err != nil {
			if !reflect.ValueOf(e).IsZero() {
				t.Fatalf("after %v the event is %+v", err, e)
			}
			return
		}
		invalid := P(&e).Validate()
		_, _ = schemas.ContentDigest(P(&e))
		first, err := schemas.Encode(P(&e))
		if err != nil {
			if invalid == nil {
				t.Fatalf("a valid event does not encode: %v", err)
			}
			return
		}
		var again T
		if err := schemas.Decode(first, P(&again)); err != nil {
			t.Fatalf("own encoding % x: %v", first, err)
		}
		second, err := schemas.Encode(P(&again))
		if err != nil || !bytes.Equal(first, second) {
			t.Fatalf("encodes to % x and then to % x (%v)", first, second, err)
		}
		if invalid != nil {
			return
		}
		if err := P(&again).Validate(); err != nil {
			t.Fatalf("valid event is not valid after a round trip: %v", err)
		}
		if err := schema.Validate(decodedTwin(t, first)); err != nil {
			t.Fatalf("valid event %+v, but %#v", e, err)
		}
	})
}

func compile(t testing.TB, data []byte) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("event", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("event")
	if err != nil {
		t.Fatal(err)
	}
	return s
}
