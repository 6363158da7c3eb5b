package schemas_test

import (
	"bytes"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/schemas"
)

type object = map[string]any

func packed(t testing.TB, v any) []byte {
	t.Helper()
	data, err := msgpack.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestDecode_wrongType(t *testing.T) {
	tests := []struct {
		name  string
		event schemas.Event
		in    object
		want  string
	}{
		{"version 0", &schemas.Prompt{}, object{"v": 0, "prompt": "x"}, "v: 0; must be 1"},
		{"version 0 of a reward", &schemas.Reward{}, object{"v": 0}, "v: 0; must be 1"},
		{"string for int", &schemas.Prompt{}, object{"group_size": "8"}, `group_size: "8"; must be an integer`},
		{"float for int", &schemas.Prompt{}, object{"group_size": 3.5}, "group_size: the float 3.5; must be an integer"},
		{"whole float for int", &schemas.Prompt{}, object{"group_size": 3.0}, "group_size: the float 3; must be an integer"},
		{"bool for int", &schemas.Prompt{}, object{"group_size": true}, "group_size: true; must be an integer"},
		{"bytes for int", &schemas.Prompt{}, object{"group_size": []byte{8}}, "group_size: bytes; must be an integer"},
		{"list for int", &schemas.Prompt{}, object{"group_size": []int{8}}, "group_size: a list; must be an integer"},
		{"null for int", &schemas.Request{}, object{"group_size": nil}, "group_size: null; must be an integer"},
		{"above int64", &schemas.Prompt{}, object{"seed": uint64(math.MaxInt64) + 1}, "seed: 9223372036854775808; must be at most 9223372036854775807"},
		{"negative for uint64", &schemas.Request{}, object{"sample_seed": -1}, "sample_seed: -1; must not be negative"},
		{"very negative for uint64", &schemas.Request{}, object{"sample_seed": int64(math.MinInt64)}, "sample_seed: -9223372036854775808; must not be negative"},
		{"string for uint64", &schemas.Request{}, object{"sample_seed": "x"}, `sample_seed: "x"; must be an integer`},
		{"null for uint64", &schemas.Request{}, object{"sample_seed": nil}, "sample_seed: null; must be an integer"},
		{"int for string", &schemas.Prompt{}, object{"prompt": 5}, "prompt: 5; must be a string"},
		{"negative int for string", &schemas.Prompt{}, object{"prompt": -5}, "prompt: -5; must be a string"},
		{"bytes for string", &schemas.Prompt{}, object{"prompt": []byte("x")}, "prompt: bytes; must be a string"},
		{"null for string", &schemas.Prompt{}, object{"prompt": nil}, "prompt: null; must be a string"},
		{"no prompt", &schemas.Prompt{}, object{"v": 1, "pormpt": "x"}, "prompt: missing; must be there, if only empty"},
		{"string for float", &schemas.Request{}, object{"noise_level": "0.7"}, `noise_level: "0.7"; must be a number`},
		{"null for float", &schemas.Request{}, object{"noise_level": nil}, "noise_level: null; must be a number"},
		{"float32 overflow", &schemas.Request{}, object{"sigmas": []float64{1e39}}, "sigmas[0]: 1e+39; must fit 32 bits"},
		{"int for flag", &schemas.Prompt{}, object{"validation": 1}, "validation: 1; must be true or false"},
		{"null for required flag", &schemas.Receipt{}, object{"accepted": nil}, "accepted: null; must be true or false"},
		{"string for bytes", &schemas.Dead{}, object{"data": "abc"}, `data: "abc"; must be bytes`},
		{"list for bytes", &schemas.Dead{}, object{"data": []int{1}}, "data: a list; must be bytes"},
		{"map for list", &schemas.Prompt{}, object{"sigmas": object{}}, "sigmas: a map; must be a list"},
		{"string for list", &schemas.Prompt{}, object{"sigmas": "1,0"}, `sigmas: "1,0"; must be a list`},
		{"bytes for list", &schemas.Prompt{}, object{"sigmas": []byte{1}}, "sigmas: bytes; must be a list"},
		{"null item", &schemas.Prompt{}, object{"sigmas": []any{1.0, nil}}, "sigmas[1]: null; must be a number"},
		{"list for struct", &schemas.Prompt{}, object{"rollout": []any{}}, "rollout: a list; must be a map"},
		{"null for struct", &schemas.Prompt{}, object{"rollout": nil}, "rollout: null; must be a map"},
		{"nested field", &schemas.Prompt{}, object{"rollout": object{"sde_window": object{"size": "2"}}}, `rollout.sde_window.size: "2"; must be an integer`},
		{"float index", &schemas.Prompt{}, object{"rollout": object{"sde_step_indices": []any{0, 1, 3.5}}}, "rollout.sde_step_indices[2]: the float 3.5; must be an integer"},
		{"field of an item", &schemas.Prompt{}, object{"reward": []any{object{"name": "a"}, object{"name": 1}}}, "reward[1].name: 1; must be a string"},
		{"null item that is a struct", &schemas.Prompt{}, object{"reward": []any{nil}}, "reward[0]: null; must be a map"},
		{"number as param", &schemas.Prompt{}, object{"reward": []any{object{"params": object{"k": 1}}}}, "reward[0].params.k: 1; must be a string"},
		{"tensor field", &schemas.Step{}, object{"latents": []any{object{"tensor": object{"shape": []any{"x"}}}}}, `latents[0].tensor.shape[0]: "x"; must be an integer`},
		{"metadata list", &schemas.Prompt{}, object{"metadata": []int{}}, "metadata: a list; must be a map"},
		{"metadata bytes", &schemas.Prompt{}, object{"metadata": []byte{0x80}}, "metadata: bytes; must be a map"},
		{"metadata too deep", &schemas.Prompt{}, object{"metadata": deep(schemas.MaxMetadataDepth + 1)}, "metadata: nested too deep at byte 25"},
		{"metadata too large", &schemas.Prompt{}, object{"metadata": object{"a": strings.Repeat("x", schemas.MaxMetadataBytes)}}, "metadata: 16390 bytes; must be at most 16384"},
		{"long string", &schemas.Prompt{}, object{"seed": strings.Repeat("é", 1000)}, `seed: "` + strings.Repeat("é", 32) + `"...; must be an integer`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := schemas.Decode(packed(t, tt.in), tt.event)
			var fe *schemas.FieldError
			if !errors.As(err, &fe) || fe.Error() != tt.want {
				t.Errorf("Decode(%v) = %v, want field error %q", tt.in, err, tt.want)
			}
			if !reflect.ValueOf(tt.event).Elem().IsZero() {
				t.Errorf("event after an error is %+v, want zero", tt.event)
			}
		})
	}
}

func TestDecode_integerWidths(t *testing.T) {
	for _, in := range []any{int8(5), int16(5), int32(5), int64(5), uint8(5), uint16(5), uint32(5), uint64(5)} {
		var p schemas.Prompt
		if err := schemas.Decode(packed(t, object{"prompt": "", "group_size": in, "true_cfg_scale": in}),
			&p); err != nil {
			t.Fatalf("%T: %v", in, err)
		}
		if *p.GroupSize != 5 || *p.TrueCFGScale != 5 {
			t.Errorf("%T decodes to %d and %v, want 5", in, *p.GroupSize, *p.TrueCFGScale)
		}
	}
	for _, want := range []int64{
		math.MinInt64, math.MinInt32 - 1, math.MinInt32, -32769, -32768, -129, -128, -33, -32,
		-1, 0, 127, 128, 255, 256, 65535, 65536, math.MaxUint32, math.MaxUint32 + 1, math.MaxInt64,
	} {
		p := schemas.Prompt{Routing: schemas.Routing{Priority: &want}}
		var got schemas.Prompt
		if err := schemas.Decode(encoded(t, &p), &got); err != nil || *got.Priority != want {
			t.Errorf("%d comes back as %v, %v", want, *got.Priority, err)
		}
	}
}

func TestDecode_numbers(t *testing.T) {
	var p schemas.Prompt
	in := object{
		"prompt": "", "sigmas": []any{1, 0.5, float32(0.25)}, "rollout": object{"noise_level": 1},
		"true_cfg_scale": -3,
	}
	if err := schemas.Decode(packed(t, in), &p); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(p.Sigmas, []float64{1, 0.5, 0.25}) || *p.Rollout.NoiseLevel != 1 || *p.TrueCFGScale != -3 {
		t.Errorf("got sigmas %v, noise level %v, scale %v", p.Sigmas, *p.Rollout.NoiseLevel, *p.TrueCFGScale)
	}
	var r schemas.Request
	if err := schemas.Decode(packed(t, object{"sigmas": []any{1.0, 0.1, 0}}), &r); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(r.Sigmas, []float32{1, 0.1, 0}) {
		t.Errorf("doubles decode to %v, want them rounded to 32 bits", r.Sigmas)
	}
}

func TestDecode_nullIsNotEmpty(t *testing.T) {
	tests := []struct {
		name string
		in   object
		want []int64
	}{
		{"absent", object{}, nil},
		{"null", object{"sde_step_indices": nil, "return_step_indices": nil}, nil},
		{"empty", object{"sde_step_indices": []int{}, "return_step_indices": []int{}}, []int64{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var p, again schemas.Prompt
			if err := schemas.Decode(packed(t, object{"prompt": "x", "rollout": tt.in}), &p); err != nil {
				t.Fatal(err)
			}
			if err := schemas.Decode(encoded(t, &p), &again); err != nil {
				t.Fatal(err)
			}
			for _, got := range [][]int64{
				p.Rollout.SDEStepIndices, p.Rollout.ReturnStepIndices, again.Rollout.SDEStepIndices,
				again.Rollout.ReturnStepIndices,
			} {
				if (got == nil) != (tt.want == nil) || len(got) != 0 {
					t.Errorf("got %#v, want %#v", got, tt.want)
				}
			}
		})
	}
	var p schemas.Prompt
	if err := schemas.Decode(packed(t, object{"prompt": "", "sigmas": []int{}}), &p); err != nil || p.Sigmas == nil {
		t.Errorf("sigmas [] decode to %#v, %v, want an empty list", p.Sigmas, err)
	}
}

// Fields that are left out when empty may also be null: clients write None.
func TestDecode_nullForOptional(t *testing.T) {
	in := object{"prompt": "x", "metadata": nil, "reward": nil, "rollout": object{"debug": nil}}
	for _, name := range []string{
		"uid", "negative_prompt", "model", "group_size", "seed", "height", "width", "num_inference_steps", "true_cfg_scale",
		"initial_noise", "start", "stop", "batch", "deadline", "priority", "min_policy_version", "validation",
	} {
		in[name] = nil
	}
	var p schemas.Prompt
	if err := schemas.DecodeValid(packed(t, in), &p); err != nil {
		t.Fatal(err)
	}
	if want := (schemas.Prompt{Prompt: "x"}); !reflect.DeepEqual(p, want) {
		t.Errorf("got %+v, want %+v", p, want)
	}
}

func TestDecode_unknownFields(t *testing.T) {
	in := object{
		"prompt": "x", "from_the_future": object{"a": []any{1, "b", nil, []byte{1}}}, "rollout": object{"also_new": 1, "solver": "heun"}, "zz": 1,
	}
	var p schemas.Prompt
	if err := schemas.DecodeValid(packed(t, in), &p); err != nil {
		t.Fatal(err)
	}
	if p.Prompt != "x" || p.Rollout.Solver != "heun" {
		t.Errorf("got %+v", p)
	}
}

func TestDecode_reusedStruct(t *testing.T) {
	e := completedTrajectory(t)
	want := &schemas.Trajectory{V: schemas.Version, Identity: schemas.Identity{Run: "r"}}
	data := packed(t, object{"v": 1, "run": "r"})
	if err := schemas.Decode(data, e); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(e, want) {
		t.Errorf("reused struct holds %+v, want %+v", e, want)
	}
	if err := schemas.Decode([]byte{0x90}, e); err == nil || !reflect.ValueOf(e).Elem().IsZero() {
		t.Errorf("after %v the struct holds %+v, want zero", err, e)
	}
}

// Latents alias the message; text and metadata do not.
func TestDecode_aliases(t *testing.T) {
	data := encoded(t, sdeStep())
	var s schemas.Step
	if err := schemas.Decode(data, &s); err != nil {
		t.Fatal(err)
	}
	latent := s.Latents[0].Tensor.Data
	at := bytes.Index(data, latent)
	data[at] ^= 0xff
	if latent[0] != data[at] {
		t.Error("latents were copied")
	}
	behind := bytes.Clone(data)
	_ = append(latent, 1, 2, 3)
	if !bytes.Equal(data, behind) {
		t.Error("appending to latents wrote into the message")
	}
	p := fullPrompt(t)
	data = encoded(t, p)
	var q schemas.Prompt
	if err := schemas.Decode(data, &q); err != nil {
		t.Fatal(err)
	}
	clear(data)
	q.V = p.V
	if !reflect.DeepEqual(&q, p) {
		t.Errorf("prompt changed with the message: %+v", q)
	}
}

func TestDecode_target(t *testing.T) {
	if err := schemas.Decode([]byte{0x80}, (*schemas.Step)(nil)); err == nil {
		t.Error("decoded into a nil pointer")
	}
	if err := schemas.Decode([]byte{0x80}, nil); err == nil {
		t.Error("decoded into nil")
	}
}

// A general decoder reads the same from what Encode writes.
func TestEncode_generalDecoder(t *testing.T) {
	for _, s := range samples(t) {
		data := encoded(t, s.event)
		want, got := blank(t, s.event), blank(t, s.event)
		if err := schemas.Decode(data, want); err != nil {
			t.Fatal(err)
		}
		if err := msgpack.Unmarshal(data, got); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: general decoder gives\n%+v\nwant\n%+v", s.name, got, want)
		}
	}
}

func TestEncode_version(t *testing.T) {
	p := &schemas.Prompt{Prompt: "x"}
	if data := encoded(t, p); !bytes.Contains(data, []byte("\xa1v\x01")) {
		t.Errorf("no version 1 in % x", data)
	}
	if p.V != 0 {
		t.Errorf("Encode set V to %d in the caller's event", p.V)
	}
	if _, err := schemas.Encode(&schemas.Prompt{V: 2, Prompt: "x"}); err == nil ||
		!strings.Contains(err.Error(), "v: 2; must be 1") {
		t.Errorf("Encode of version 2 = %v", err)
	}
	if err := (&schemas.Prompt{V: 2, Prompt: "x"}).Validate(); err == nil || err.Error() != "v: 2; must be 1" {
		t.Errorf("Validate of version 2 = %v", err)
	}
}

func TestEncode_refuses(t *testing.T) {
	tests := []struct {
		name  string
		event schemas.Event
		want  string
	}{
		{"nil", (*schemas.Step)(nil), "nil"},
		{"nothing", nil, "not an event"},
		{"text that is not UTF-8", &schemas.Prompt{Prompt: "\xff"}, "not UTF-8"},
		{"metadata that is no map", &schemas.Prompt{Prompt: "x", Metadata: schemas.Metadata{0x01}}, "must be a map"},
		{"metadata that is empty", &schemas.Request{Group: schemas.Group{Metadata: schemas.Metadata("\x81\xa1k")}}, "ends within"},
		{"too many bytes", &schemas.Dead{Data: make([]byte, schemas.MaxEventBytes)}, "too large"},
		{"list too long", &schemas.Prompt{ImageSettings: schemas.ImageSettings{Sigmas: make([]float64, schemas.MaxListItems+1)}}, "list too long"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := schemas.Encode(tt.event); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Encode = %v, want an error with %q", err, tt.want)
			}
		})
	}
}

// A dead letter goes out whatever the refused message was.
func TestEncode_deadLetterIsRepaired(t *testing.T) {
	d := &schemas.Dead{
		Service: "intake", Code: "decode", Reason: strings.Repeat("é", schemas.MaxText) + "\xff", Run: "_", UID: "_",
		OriginalSubject: strings.Repeat("\xfe", 2*schemas.MaxSubject), Stream: "MDR_PROMPTS",
		Headers: append([]schemas.Header{{Name: "X\xff", Value: "a\xc3\x28b"}}, make([]schemas.Header, 200)...),
		Data:    []byte{0xc1, 0xff},
	}
	for i := range d.Headers {
		d.Headers[i].Name += "n"
	}
	var got schemas.Dead
	if err := schemas.DecodeValid(encoded(t, d), &got); err != nil {
		t.Fatal(err)
	}
	if got.Headers[0].Name != "X\uFFFDn" || got.Headers[0].Value != "a\uFFFD(b" {
		t.Errorf("header is %q", got.Headers[0])
	}
	if want := strings.Repeat("é", schemas.MaxText/2); got.Reason != want {
		t.Errorf("reason has %d bytes, want %d", len(got.Reason), len(want))
	}
	if !bytes.Equal(got.Data, d.Data) {
		t.Errorf("data is % x, want it unchanged", got.Data)
	}
	if len(got.Headers) != schemas.MaxHeaders || len(d.Headers) != 201 || d.Headers[0].Value != "a\xc3\x28b" {
		t.Errorf("%d headers went out, the caller's are %d with %q", len(got.Headers), len(d.Headers), d.Headers[0])
	}
}

// A failure is reported whatever its text is.
func TestEncode_errorsAreRepaired(t *testing.T) {
	long, bad := strings.Repeat("x", schemas.MaxText+1), "a\xffb"
	r := find[schemas.Reward](t, "reward-scored")
	r.Status, r.Reward, r.Error, r.Scores[1].Error = "failed", nil, long, bad
	var reward schemas.Reward
	if err := schemas.DecodeValid(encoded(t, r), &reward); err != nil {
		t.Fatal(err)
	}
	if reward.Error != long[1:] || reward.Scores[1].Error != "a\uFFFDb" {
		t.Errorf("errors are %d bytes and %q", len(reward.Error), reward.Scores[1].Error)
	}
	if r.Error != long || r.Scores[1].Error != bad {
		t.Error("Encode changed the caller's event")
	}
	j := find[schemas.Trajectory](t, "trajectory-failed")
	j.Error = bad
	var trajectory schemas.Trajectory
	if err := schemas.DecodeValid(encoded(t, j), &trajectory); err != nil || trajectory.Error != "a\uFFFDb" {
		t.Errorf("error is %q, %v", trajectory.Error, err)
	}
	c := find[schemas.Receipt](t, "receipt-refused")
	c.Error = long
	var receipt schemas.Receipt
	if err := schemas.DecodeValid(encoded(t, c), &receipt); err != nil || len(receipt.Error) != schemas.MaxText {
		t.Errorf("error has %d bytes, %v", len(receipt.Error), err)
	}
}

func BenchmarkEncode(b *testing.B) {
	s := largeStep()
	b.SetBytes(int64(len(encoded(b, s))))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := schemas.Encode(s); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecode(b *testing.B) {
	data := encoded(b, largeStep())
	decoders := []struct {
		name   string
		decode func([]byte, *schemas.Step) error
	}{
		{"decoder=schemas", func(data []byte, s *schemas.Step) error { return schemas.Decode(data, s) }},
		{"decoder=msgpack", func(data []byte, s *schemas.Step) error { return msgpack.Unmarshal(data, s) }},
	}
	for _, bb := range decoders {
		b.Run(bb.name+"/event=step/latents=512KiB", func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			for b.Loop() {
				var s schemas.Step
				if err := bb.decode(data, &s); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
