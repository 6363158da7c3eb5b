package schemas_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// layout writes the documented bytes by hand, as another language would.
type layout []byte

func (l layout) int(n int64) layout   { return binary.LittleEndian.AppendUint64(l, uint64(n)) }
func (l layout) text(s string) layout { return append(l.int(int64(len(s))), s...) }
func (l layout) f64(x float64) layout {
	return binary.LittleEndian.AppendUint64(l, math.Float64bits(x))
}

func (l layout) f32(x float32) layout {
	return binary.LittleEndian.AppendUint32(l, math.Float32bits(x))
}

func (l layout) digest() string { return schemas.BLAKE3.Text(schemas.BLAKE3.Sum(l)) }

// scheduleVector was computed by testdata/check.py, which prints it and checks it too.
const scheduleVector = "blake3:400dafc8e657070d58e598576a11d827ab5a2bbf236f8e7dfe92253ae34053e5"

func TestRequest_ComputeScheduleDigest(t *testing.T) {
	r := &schemas.Request{
		Sampling: schemas.Sampling{
			Prompt: "of the content alone", Sigmas: []float32{1, 0.5, 0}, Transitions: []string{"sde", "ode"},
			NoiseLevel: 0.7, Solver: "euler", LogProbKind: "density", LatentsDType: "BF16", TrueCFGScale: 4, Height: 64,
			Width: 128,
		},
	}
	want := layout{}.text("meander schedule 1").
		text("sigmas").int(3).f32(1).f32(0.5).f32(0).
		text("transitions").int(2).text("sde").text("ode").
		text("noise_level").f64(0.7).text("solver").text("euler").text("log_prob_kind").text("density").
		text("latents_dtype").text("BF16").text("true_cfg_scale").f64(4).text("height").int(64).
		text("width").int(128).text("").digest()
	if got := r.ComputeScheduleDigest(); got != want {
		t.Errorf("digest %s, want %s", got, want)
	}
	if got := r.ComputeScheduleDigest(); got != scheduleVector {
		t.Errorf("digest %s, want the committed %s", got, scheduleVector)
	}
}

// Everything a schedule digest must and must not depend on.
func TestRequest_ComputeScheduleDigest_fields(t *testing.T) {
	inside := []string{"Text"}
	for _, f := range schemas.Fields(reflect.TypeFor[schemas.Sampling]()) {
		if f.Digest == "" {
			inside = append(inside, f.GoName)
		}
	}
	r := fullRequest(t)
	r.Start, r.Stop = segment(1, 3)
	r.CheckpointStepIndices = []int64{2}
	r.StepSeeds, r.Conditions = []schemas.StepSeed{{StepIndex: 2, Seed: 5}}, conditions()
	r.NetworkTimesteps = []float32{999, 749, 499, 249}
	r.Arguments = map[string]string{"strength": "0.5"}
	checkFields(t, r, inside, func(r *schemas.Request) (any, error) { return r.ComputeScheduleDigest(), nil })
}

func TestContentDigest_fields(t *testing.T) {
	content := func(e schemas.Event) (any, error) { return schemas.ContentDigest(e) }
	t.Run("step", func(t *testing.T) {
		checkFields(t, tracksStep(), entering[schemas.Step](), func(e *schemas.Step) (any, error) { return content(e) })
	})
	t.Run("trajectory", func(t *testing.T) {
		e := tracksTrajectory(t)
		e.Frames, e.Media, e.CFGScales = 5, append(video(e, 5), sound()), e.StepScales()
		e.NameTracks()
		e.Start, e.Stop = segment(1, 3)
		e.StepSeeds, e.Conditions = []schemas.StepSeed{{StepIndex: 2, Seed: 5}}, conditions()
		e.NetworkTimesteps = []float32{999, 749, 499, 249}
		e.Arguments = map[string]string{"strength": "0.5"}
		checkFields(t, e, entering[schemas.Trajectory](),
			func(e *schemas.Trajectory) (any, error) { return content(e) })
	})
	t.Run("reward", func(t *testing.T) {
		e := find[schemas.Reward](t, "reward-scored")
		e.Stages = stagesReward(t).Stages
		checkFields(t, e, entering[schemas.Reward](), func(e *schemas.Reward) (any, error) { return content(e) })
	})
	t.Run("advantage", func(t *testing.T) {
		e := find[schemas.Advantage](t, "advantage-steps")
		e.BranchScope, e.Branches = "depth", find[schemas.Advantage](t, "advantage-tree").Branches
		e.Credits = creditsAdvantage(t).Credits
		checkFields(t, e, entering[schemas.Advantage](), func(e *schemas.Advantage) (any, error) { return content(e) })
	})
	t.Run("batch", func(t *testing.T) {
		checkFields(t, find[schemas.Batch](t, "batch-short"), entering[schemas.Batch](),
			func(e *schemas.Batch) (any, error) { return content(e) })
	})
}

// entering are the fields of T that enter its content digest, as their tags say.
func entering[T any]() []string {
	var names []string
	for _, f := range schemas.Fields(reflect.TypeFor[T]()) {
		if f.Digest != schemas.DigestNone {
			names = append(names, f.GoName)
		}
	}
	return names
}

// checkFields changes one field after the other and sees that the digest changes
// exactly for those named inside.
func checkFields[T any](t *testing.T, e *T, inside []string, digest func(*T) (any, error)) {
	t.Helper()
	before, err := digest(e)
	if err != nil {
		t.Fatal(err)
	}
	v := reflect.ValueOf(e).Elem()
	for _, field := range schemas.Fields(v.Type()) {
		name := field.GoName
		c := reflect.New(v.Type())
		c.Elem().Set(v)
		f := field.In(c.Elem())
		switch f.Kind() {
		case reflect.Int64:
			f.SetInt(f.Int() + 1)
		case reflect.Uint64:
			f.SetUint(f.Uint() + 1)
		case reflect.Float32, reflect.Float64:
			f.SetFloat(f.Float() + 1)
		case reflect.Bool:
			f.SetBool(!f.Bool())
		case reflect.String:
			f.SetString(f.String() + "x")
		default: // lists, pointers and structs
			if f.Kind() == reflect.Pointer && f.IsNil() {
				f.Set(reflect.New(f.Type().Elem()))
			} else {
				f.SetZero()
			}
		}
		if reflect.DeepEqual(f.Interface(), field.In(v).Interface()) {
			t.Fatalf("%s: the sample has nothing to change", name)
		}
		after, err := digest(c.Interface().(*T))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if changed, want := before != after, slices.Contains(inside, name); changed != want {
			t.Errorf("%s: digest changes %v, want %v", name, changed, want)
		}
	}
}

// A trajectory repeats every setting of its request: AnsweredBy names each one that differs.
func TestRequest_AnsweredBy_fields(t *testing.T) {
	e := tracksTrajectory(t)
	e.Start, e.Stop = segment(1, 3)
	e.StepSeeds, e.CFGScales = []schemas.StepSeed{{StepIndex: 2, Seed: 5}}, e.StepScales()
	e.Conditions, e.Arguments = conditions(), map[string]string{"strength": "0.5"}
	e.NetworkTimesteps = []float32{999, 749, 499, 249}
	request := &schemas.Request{
		Identity: e.Identity, Sampling: e.Sampling, ScheduleDigest: e.ScheduleDigest, Group: e.Group,
	}
	var repeated []string
	for _, part := range []reflect.Type{reflect.TypeFor[schemas.Identity](), reflect.TypeFor[schemas.Sampling]()} {
		for _, f := range schemas.Fields(part) {
			repeated = append(repeated, f.GoName)
		}
	}
	repeated = append(repeated, "Text", "StopReason", "Steps", "Conditioning", "ScheduleDigest", "Group")
	checkFields(t, e, repeated, func(e *schemas.Trajectory) (any,
		error,
	) {
		return fmt.Sprint(request.AnsweredBy(e)), nil
	})
}

// How a tensor travels is not part of what it is. By another algorithm than that of its digest it is not known.
func TestStep_ContentDigest_transport(t *testing.T) {
	inline := sdeStep()
	data := inline.Latents[0].Tensor.Data
	size := int64(len(data))
	want, err := schemas.ContentDigest(inline)
	if err != nil {
		t.Fatal(err)
	}
	other := sdeStep()
	other.Latents[0].Tensor.Data[5] ^= 1
	if got, err := schemas.ContentDigest(other); err != nil || got == want {
		t.Errorf("one bit of a latent changes nothing (%v)", err)
	}
	for h, carrier := range map[schemas.Hash]schemas.Tensor{
		schemas.BLAKE3: {Parts: &schemas.Parts{First: 3, Count: 1, Size: size}},
		schemas.SHA256: {Ref: &schemas.Ref{Bucket: "b", Size: size}},
	} {
		digest := h.Text(h.Sum(data))
		if carrier.Ref != nil {
			carrier.Ref.Digest = digest
		} else {
			carrier.Parts.Digest = digest
		}
		s := sdeStep()
		carrier.DType, carrier.Shape = s.Latents[0].Tensor.DType, s.Latents[0].Tensor.Shape
		s.Latents[0].Tensor = carrier
		got, err := schemas.ContentDigest(s)
		switch {
		case h == schemas.SHA256 && (err == nil || !strings.Contains(err.Error(), "digest: ")):
			t.Errorf("%+v gives %v; want an error that names the digest", carrier, err)
		case h == schemas.BLAKE3 && (err != nil || got != want):
			t.Errorf("%+v gives %x (%v), want %x as inline", carrier, got, err, want)
		}
	}
}

func TestStepsDigest(t *testing.T) {
	a, b := [32]byte{1}, [32]byte{2}
	want := append(append(layout{}.text("meander steps 1").int(2), a[:]...), b[:]...).digest()
	if got := schemas.StepsDigest([][32]byte{a, b}); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if schemas.StepsDigest([][32]byte{b, a}) == want {
		t.Error("order does not matter")
	}
}

func TestContentDigest_none(t *testing.T) {
	for _, e := range []schemas.Event{
		&schemas.Prompt{}, &schemas.Request{}, &schemas.Policy{}, &schemas.Verdict{},
		&schemas.Dead{}, &schemas.Receipt{},
	} {
		if _, err := schemas.ContentDigest(e); !errors.Is(err, schemas.ErrNoContent) {
			t.Errorf("%s: %v, want ErrNoContent", e.Type(), err)
		}
	}
}

func conditions() []schemas.Condition {
	digest := digestOf("image")
	ref := &schemas.Ref{Bucket: schemas.BlobBucket, Digest: strings.TrimPrefix(digest, "sha256:"), Size: 9}
	return []schemas.Condition{{Name: "image", Type: "image", DataImage: schemas.DataImage{Ref: ref}}}
}

// Conditions decide samples, wherever their bytes are.
func TestRequest_Conditions(t *testing.T) {
	a, b, c := fullRequest(t), fullRequest(t), fullRequest(t)
	a.Conditions, b.Conditions = conditions(), conditions()
	b.Conditions[0].Ref.Bucket = "elsewhere"
	if a.ComputeScheduleDigest() != b.ComputeScheduleDigest() ||
		a.ComputeScheduleDigest() == c.ComputeScheduleDigest() {
		t.Error("the digest of the schedule is not that of its conditions")
	}
	b.Arguments = map[string]string{"strength": "0.5"}
	if a.ComputeScheduleDigest() == b.ComputeScheduleDigest() {
		t.Error("the digest of the schedule is not that of its arguments")
	}
	a.Conditions = append(a.Conditions, a.Conditions[0])
	if err := a.Validate(); err != nil {
		t.Errorf("two files of one name: %v", err)
	}
	a.Conditions[0].Name = "mask"
	if err := a.Validate(); err == nil || !strings.Contains(err.Error(), `conditions[1].name: "image"; must not be below the one before it`) {
		t.Errorf("%v", err)
	}
	a.Conditions = []schemas.Condition{{Name: "image", DataImage: schemas.DataImage{Data: []byte{1}}}}
	if err := a.Validate(); err == nil || !strings.Contains(err.Error(), "conditions[0].ref") ||
		!strings.Contains(err.Error(), "conditions[0].type") {
		t.Errorf("a file that is not stored: %v", err)
	}
}
