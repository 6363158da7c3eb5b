//go:build cuda

package main

// #include <stdint.h>
import "C"

import (
	"errors"
	"unsafe"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// queues are the streams of a GPU besides the first, and its events. What is copied on a stream
// arrives when a call waits for an event after it, and not before.
type queues struct {
	next    C.uintptr_t
	streams map[C.uintptr_t]*point
	events  map[C.uintptr_t]*point
}

// point is how far a stream is, or was when an event was recorded.
type point struct {
	launches int // that are done before
	copies   []func() error
	sleeps   bool // who waits for the event
}

func newQueues() queues {
	return queues{streams: map[C.uintptr_t]*point{}, events: map[C.uintptr_t]*point{}}
}

func (q *queues) add(to map[C.uintptr_t]*point) C.uintptr_t {
	q.next++
	to[q.next] = &point{}
	return q.next
}

// stream is a point in the stream of a number, 0 being the first: that of all launches.
func (g *gpu) stream(number C.uintptr_t) (*point, error) {
	if number == 0 {
		return &point{launches: g.launches}, nil
	}
	if p := g.streams[number]; p != nil {
		return p, nil
	}
	return nil, driver.ErrInvalidValue
}

// pinned refuses memory of the host that may move or be reused before a copy is done.
func (g *gpu) pinned(p unsafe.Pointer, size C.size_t) error {
	for at, n := range g.host {
		if off := uintptr(p) - uintptr(at); uintptr(p) >= uintptr(at) && off+uintptr(size) <= uintptr(n) {
			return nil
		}
	}
	return errors.Join(errors.New("a copy beside the launches, of memory that is not of cuMemHostAlloc"),
		driver.ErrInvalidValue)
}

//export cuStreamCreate
func cuStreamCreate(stream *C.uintptr_t, flags C.uint) C.int {
	return on(false, func(g *gpu) error {
		*stream = g.add(g.streams)
		return nil
	})
}

//export cuStreamDestroy_v2
func cuStreamDestroy_v2(stream C.uintptr_t) C.int {
	return on(false, func(g *gpu) error {
		delete(g.streams, stream)
		return nil
	})
}

//export cuStreamWaitEvent
func cuStreamWaitEvent(stream, event C.uintptr_t, _ C.uint) C.int {
	return on(false, func(g *gpu) error {
		p, err := g.stream(stream)
		e := g.events[event]
		if err != nil || e == nil {
			return driver.ErrInvalidValue
		}
		p.launches = max(p.launches, e.launches)
		return nil
	})
}

//export cuEventCreate
func cuEventCreate(event *C.uintptr_t, flags C.uint) C.int {
	return on(false, func(g *gpu) error {
		*event = g.add(g.events)
		g.events[*event].sleeps = flags&1 != 0 // CU_EVENT_BLOCKING_SYNC
		return nil
	})
}

//export cuEventDestroy_v2
func cuEventDestroy_v2(event C.uintptr_t) C.int {
	return on(false, func(g *gpu) error {
		delete(g.events, event)
		return nil
	})
}

//export cuEventRecord
func cuEventRecord(event, stream C.uintptr_t) C.int {
	return on(false, func(g *gpu) error {
		p, err := g.stream(stream)
		if e := g.events[event]; err == nil && e != nil {
			e.launches, e.copies, p.copies = p.launches, append(e.copies, p.copies...), nil
			return nil
		}
		return driver.ErrInvalidValue
	})
}

//export cuEventSynchronize
func cuEventSynchronize(event C.uintptr_t) C.int {
	return on(false, func(g *gpu) error {
		e := g.events[event]
		switch {
		case e == nil:
			return driver.ErrInvalidValue
		case !e.sleeps:
			return errors.Join(errors.New("a wait for an event that takes a core"), driver.ErrInvalidValue)
		}
		var err error
		for _, copy := range e.copies {
			err = errors.Join(err, copy())
		}
		e.copies = nil
		return err
	})
}

//export cuMemcpyHtoDAsync_v2
func cuMemcpyHtoDAsync_v2(dst C.uint64_t, src unsafe.Pointer, size C.size_t, stream C.uintptr_t) C.int {
	return on(false, func(g *gpu) error {
		if stream != 0 {
			return driver.ErrInvalidValue // launches would not wait for it
		}
		if err := g.pinned(src, size); err != nil {
			return err
		}
		return g.vm.CopyIn(driver.Pointer(dst), unsafe.Slice((*byte)(src), int(size)))
	})
}

//export cuMemcpyDtoHAsync_v2
func cuMemcpyDtoHAsync_v2(dst unsafe.Pointer, src C.uint64_t, size C.size_t, stream C.uintptr_t) C.int {
	return on(false, func(g *gpu) error {
		p, err := g.stream(stream)
		if err != nil {
			return err
		}
		if err := g.pinned(dst, size); err != nil {
			return err
		}
		if p.launches < g.launches {
			return errors.Join(errors.New("a copy that does not wait for the launches before it"),
				driver.ErrInvalidValue)
		}
		p.copies = append(p.copies, func() error {
			return g.vm.CopyOut(unsafe.Slice((*byte)(dst), int(size)), driver.Pointer(src))
		})
		return nil
	})
}
