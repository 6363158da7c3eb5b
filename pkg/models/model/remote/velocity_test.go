package remote_test

import (
	"errors"
	"image"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
)

// A worker that lost an encoded prompt gets it again, also one that was made from stored tensors.
func TestVelocity_Handles(t *testing.T) {
	w, m := join(t, remotetest.Options{})
	rows := rowsOf(t, m, 4)
	want := velocity(t, m, rows)
	w.Forget()
	for i, r := range rows {
		stored := *r.Conditioning
		rows[i].Conditioning = &stored
	}
	if got := velocity(t, m, rows); !slices.EqualFunc(got, want, slices.Equal) {
		t.Error("other velocities after the prompts were lost")
	}
	if n := w.Calls(wire.CallPut); n != 2 {
		t.Errorf("%d prompts were sent; want the two that there are", n)
	}
	w.Play(wire.CallVelocity, remotetest.Fail(wire.ClassHandle, "a"), remotetest.Fail(wire.ClassHandle, "b"))
	if err := m.Velocity(t.Context(), rows, size); err == nil || !strings.Contains(err.Error(), "handle: b") {
		t.Errorf("a worker that never keeps a prompt: %v", err)
	}
}

// Rows under guidance come in pairs of one state, which is sent once.
func TestVelocity_States(t *testing.T) {
	w, m := join(t, remotetest.Options{Deterministic: true})
	rows := rowsOf(t, m, 5)
	rows[2].X, rows[4].X = rows[0].X, rows[1].X
	states := make(chan int, 2)
	note := func(_ *remotetest.Worker, c net.Conn, call *wire.Message, answer func() *wire.Message) {
		states <- call.Tensors[0].Shape[0]
		_ = wire.Write(c, answer())
	}
	w.Play(wire.CallVelocity, note, note)
	got := velocity(t, m, rows)
	for i := range rows {
		rows[i].X = slices.Clone(rows[i].X)
	}
	want := velocity(t, m, rows)
	sent := []int{<-states, <-states}
	if !slices.EqualFunc(got, want, slices.Equal) || !slices.Equal(sent, []int{3, 5}) {
		t.Errorf("%d states of five rows were sent, then of copies; want 3 and 5, and equal velocities", sent)
	}
}

// Weights that a shared worker lacks again and again are an error of the weights, and not of the sample.
func TestVelocity_WeightsGoneAgain(t *testing.T) {
	w, m := join(t, remotetest.Options{})
	n := replaced(t, m)
	gone := remotetest.Fail(wire.ClassWeights, "not loaded")
	w.Play(wire.CallVelocity, gone, gone, gone, gone)
	velocity(t, n, rowsOf(t, n, 2))
	w.Play(wire.CallVelocity, gone, gone, gone, gone, gone)
	err := n.Velocity(t.Context(), rowsOf(t, n, 2), size)
	if !errors.Is(err, model.ErrWeights) || !strings.Contains(err.Error(), "has no room for all of their versions") {
		t.Errorf("%v; want an error of the weights", err)
	}
	w.Play(wire.CallVelocity, gone)
	w.Play(wire.CallLoad, remotetest.Fail(wire.ClassMemory, "full"))
	calls := w.Calls(wire.CallVelocity)
	if err := n.Velocity(t.Context(), rowsOf(t, n, 2), size); !errors.Is(err, model.ErrWeights) {
		t.Errorf("%v; want an error of the weights", err)
	}
	if more := w.Calls(wire.CallVelocity) - calls; more != 1 {
		t.Errorf("%d calls: memory for weights was taken for memory for rows", more)
	}
}

// Where the memory is too small for all rows, fewer are sent at once, also later.
func TestVelocity_Memory(t *testing.T) {
	w, m := join(t, remotetest.Options{Deterministic: true, MaxRows: 3})
	rows := rowsOf(t, m, 8)
	got := velocity(t, m, rows)
	if n := w.Calls(wire.CallVelocity); n != 2+4 { // 8 and 4 fail, then 2, 2, 2, 2
		t.Errorf("%d calls", n)
	}
	for i := range rows {
		if alone := velocity(t, m, rows[i:i+1]); !slices.Equal(alone[0], got[i]) {
			t.Errorf("row %d differs", i)
		}
	}
	before := w.Calls(wire.CallVelocity)
	velocity(t, m, rows)
	if n := w.Calls(wire.CallVelocity) - before; n != 4 {
		t.Errorf("%d calls once the bound is known", n)
	}
	w.Play(wire.CallVelocity, remotetest.Fail(wire.ClassMemory, "full"))
	if err := m.Velocity(t.Context(), rows[:1], size); err == nil || !strings.Contains(err.Error(), "memory: full") {
		t.Errorf("no memory for one row: %v", err)
	}
}

// The limits that the worker says hold.
func TestVelocity_Limits(t *testing.T) {
	row := 4 * 6 * remotetest.Channels
	for _, l := range []struct{ rows, bytes, calls int }{{3, 1 << 20, 3}, {16, 1 << 16, 1}, {1, 1 << 16, 8}} {
		w, m := join(t, remotetest.Options{Limits: wire.Limits{BodyBytes: l.bytes, Rows: l.rows}})
		velocity(t, m, rowsOf(t, m, 8))
		if n := w.Calls(wire.CallVelocity); n != l.calls || 8*row > 1<<16 {
			t.Errorf("%+v: %d calls", l, n)
		}
	}
}

// Media for which the worker takes no body that large are refused by name, before anything is sent.
func TestEncodeMedia_Limit(t *testing.T) {
	w, m := join(t, remotetest.Options{Limits: wire.Limits{BodyBytes: 1 << 16, Rows: 1}})
	fits := model.Media{Frames: []*image.NRGBA{image.NewNRGBA(image.Rect(0, 0, 64, 64))}}
	if _, err := m.EncodeMedia(t.Context(), fits); err != nil {
		t.Error(err)
	}
	large := model.Media{Frames: []*image.NRGBA{image.NewNRGBA(image.Rect(0, 0, 128, 64))}}
	_, err := m.EncodeMedia(t.Context(), large)
	says := "98304 bytes in f32; must be at most 65536"
	n := w.Calls(wire.CallEncodeM)
	if !errors.Is(err, model.ErrLatents) || !strings.Contains(err.Error(), says) || n != 1 {
		t.Errorf("%v, %d calls", err, n)
	}
}

// Calls on many connections, from many goroutines, are answered each by its own result.
func TestVelocity_SideBySide(t *testing.T) {
	w, m := join(t, remotetest.Options{Deterministic: true})
	rows := rowsOf(t, m, 12)
	want := velocity(t, m, rows)
	var errs [12]chan error
	for i := range rows {
		errs[i] = make(chan error, 1)
		go func() { errs[i] <- m.Velocity(t.Context(), rows[i:i+1], size) }()
	}
	for i := range rows {
		if err := <-errs[i]; err != nil || !slices.Equal(rows[i].Dst, want[i]) {
			t.Errorf("row %d: %v", i, err)
		}
	}
	if n := w.Calls(wire.CallEncode); n != 2 {
		t.Errorf("%d prompts encoded; want each once", n)
	}
}
