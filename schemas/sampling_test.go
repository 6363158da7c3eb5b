package schemas_test

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/schemas"
)

// The second scale of guidance holds below the boundary of timesteps, which are float32, and not at it.
func TestSampling_CFGScale(t *testing.T) {
	s := schemas.Sampling{TrueCFGScale: 4, TrueCFGScale2: 3, BoundaryRatio: 0.9, Transitions: []string{"ode"}}
	for sigma, want := range map[float32]float64{
		1: 4, 0.91: 4, 0.89: 3, 0: 3,
		0.9:    4, // as float32 it is below 0.9, its timestep is 900
		0.8999: 3,
	} {
		if got := s.CFGScale(0, sigma); got != want {
			t.Errorf("scale %g at sigma %v; want %g", got, sigma, want)
		}
	}
	s.TrueCFGScale = 1
	if got := s.CFGScale(0, 0.5); got != 1 {
		t.Errorf("scale %g without guidance; want 1", got)
	}
}

// Guidance is in the steps that are whole between the two shares.
func TestSampling_StepScales(t *testing.T) {
	s := schemas.Sampling{TrueCFGScale: 4, Transitions: make([]string, 10), Sigmas: make([]float32, 11)}
	for _, c := range []struct {
		from, until float64
		begin, end  int
	}{
		{0, 0, 0, 10}, {0.3, 0, 3, 10}, {0, 0.3, 0, 3}, {0.3, 0.7, 3, 7}, {0.31, 0.69, 4, 6}, {0.29, 0.3, 3, 3}, {0.95, 0, 10, 10},
	} {
		s.CFGFrom, s.CFGUntil = c.from, c.until
		for i, got := range s.StepScales() {
			if want := 1 + 3*float64(b2i(i >= c.begin && i < c.end)); got != want {
				t.Errorf("from %g until %g: scale %g in step %d; want %g", c.from, c.until, got, i, want)
			}
		}
		if n := s.GuidedSteps(); n != int64(c.end-c.begin) {
			t.Errorf("from %g until %g: %d guided steps; want %d", c.from, c.until, n, c.end-c.begin)
		}
	}
}

func b2i(is bool) int {
	if is {
		return 1
	}
	return 0
}

// forged returns the bytes of an event with one more key in the map that path leads to.
func forged(t *testing.T, e schemas.Event, path, key string, value any) []byte {
	t.Helper()
	data, err := schemas.Encode(e)
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := msgpack.Unmarshal(data, &m); err != nil {
		t.Fatal(err)
	}
	at := m
	for _, name := range strings.FieldsFunc(path, func(r rune) bool { return r == '.' }) {
		next, ok := at[name].(map[string]any)
		if !ok {
			t.Fatalf("no map %s in %v", name, m)
		}
		at = next
	}
	at[key] = value
	if data, err = msgpack.Marshal(m); err != nil {
		t.Fatal(err)
	}
	return data
}

// A setting of a later version decodes, and readers that compute refuse it by its name and value, at each level.
func TestSampling_CheckKnown(t *testing.T) {
	request, made := fullRequest(t), completedTrajectory(t)
	made.CFGScales = made.StepScales()
	for _, c := range []struct {
		e         schemas.Event
		path, key string
		value     any
		want      string
	}{
		{made, "", "cfg_phase", 0.2, "setting cfg_phase=0.2 is not known to this version; upgrade meander"},
		{made, "start", "phase", "late", "setting start.phase=late is not known"},
		{made, "", "long", strings.Repeat("x", 100), "setting long=... is not known"},
		{made, "timings", "queue_ns", 1, ""},
		{made, "group.advantage", "power", 2, ""},
		{request, "", "cfg_phase", 0.2, "setting cfg_phase=0.2 is not known"},
	} {
		if c.path == "start" {
			with := *made
			with.Start = &schemas.SegmentStart{Branch: &schemas.Branch{Run: "r", UID: "u"}}
			c.e = &with
		}
		data := forged(t, c.e, c.path, c.key, c.value)
		e, _ := schemas.New(c.e.Type())
		if err := schemas.Decode(data, e); err != nil {
			t.Fatal(err)
		}
		err := e.(interface{ CheckKnown() error }).CheckKnown()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s.%s: %v; want %q", c.path, c.key, err, c.want)
		}
		if err := schemas.Decode(forged(t, c.e, c.path, "v", 1), e); c.path == "" && err != nil {
			t.Fatal(err)
		} else if err := e.(interface{ CheckKnown() error }).CheckKnown(); c.path == "" && err != nil {
			t.Errorf("after another event: %v", err)
		}
	}
	step := &schemas.Step{}
	stored := &schemas.Step{Run: "r", UID: "u", Attempt: "a", Transition: "ode", LogProbKind: "density"}
	if err := schemas.Decode(forged(t, stored, "", "drift", 1), step); err != nil {
		t.Fatal(err)
	}
	if err := step.CheckKnown(); err == nil || !strings.Contains(err.Error(), "drift=1") {
		t.Errorf("step: %v", err)
	}
}

// A reader refuses each setting that is set and that it does not use; those of guidance are used by who uses the scales
// of the steps.
func TestSampling_CheckUses(t *testing.T) {
	s := schemas.Sampling{Prompt: "x", TrueCFGScale: 4, CFGFrom: 0.2, CFGUntil: 0.8, GuidanceRescale: 0.7}
	if err := s.CheckUses([]string{"prompt", "cfg_scales", "guidance_rescale"}); err != nil {
		t.Error(err)
	}
	err := s.CheckUses([]string{"prompt", "cfg_scales"})
	if want := "setting guidance_rescale=0.7 is not used here"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %q", err, want)
	}
	names := schemas.FieldNames(&schemas.Trajectory{})
	for _, f := range schemas.Fields(reflect.TypeFor[schemas.Sampling]()) {
		if f.Through != "" && !slices.Contains(names, f.Through) {
			t.Errorf("%s is there through %q, which a trajectory does not have", f.Name, f.Through)
		}
	}
}

// A reader that computes takes the scales of guidance from the trajectory: without them it would leave guidance out.
func TestTrajectory_CheckKnown_scales(t *testing.T) {
	e := completedTrajectory(t)
	e.TrueCFGScale, e.CFGScales = 4, nil
	if err := e.CheckKnown(); err == nil || !strings.Contains(err.Error(),
		"cfg_scales: 0; must be those of the 4 steps") {
		t.Errorf("a guided trajectory without scales: %v", err)
	}
	if e.CFGScales = e.StepScales(); e.CheckKnown() != nil {
		t.Errorf("with its scales: %v", e.CheckKnown())
	}
	if e.CFGScales = e.CFGScales[:3]; e.CheckKnown() == nil {
		t.Error("a scale too few is accepted")
	}
	e.TrueCFGScale, e.CFGScales = 1, nil
	if err := e.CheckKnown(); err != nil {
		t.Errorf("without guidance: %v", err)
	}
}
