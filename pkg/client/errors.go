package client

import (
	"errors"

	"github.com/meander-rl/meander/pkg/bus"
)

// Errors of Connect.
var (
	// ErrUnreachable: no server answered in time.
	ErrUnreachable = errors.New("no server answers")
	// ErrUnauthorized: the server refuses our token, credentials or certificate, or wants one.
	ErrUnauthorized = errors.New("not let in")
	// ErrUntrusted: the server's certificate is not signed by a trusted authority, or it has
	// none although WithCA or WithCertificate asks for TLS.
	ErrUntrusted = errors.New("server not trusted")
	// ErrNoPipeline: the server has no streams of a pipeline; intake makes them.
	ErrNoPipeline = errors.New("no pipeline was set up there")
)

// Errors of all other calls.
var (
	// ErrNoAnswer means that no intake answered in time. What was published is stored, and
	// the next intake that runs handles it.
	ErrNoAnswer = errors.New("no intake answered in time; what was published is stored")
	// ErrJudged means that the sample already has another verdict of that name: the first counts.
	ErrJudged = errors.New("the sample has a verdict already")
	// ErrNoMedium means that a sample has no file of a kind: it failed, it stops with noise in it, or it is of another.
	ErrNoMedium = errors.New("no such file")
	// ErrNotFound means that no event or object of that name is stored, or no longer.
	ErrNotFound = bus.ErrNotFound
	// ErrCorrupt means that stored bytes do not have the digest that the trajectory names.
	ErrCorrupt = bus.ErrCorrupt
	// ErrFull means that the stream is full. Try again later: consumers, age limits or a purge
	// free space.
	ErrFull = bus.ErrStreamFull
	// ErrTooLarge means that an event is larger than the server allows.
	ErrTooLarge = bus.ErrTooLarge
	// ErrPermission means that our user may not publish that.
	ErrPermission = bus.ErrPermission
	// ErrClosed means that the client has been closed.
	ErrClosed = bus.ErrClosed
	// ErrCursor means that a cursor is malformed, or is from another store.
	ErrCursor = bus.ErrCursor
	// ErrEvicted means that groups after a cursor may have been removed before they were read.
	ErrEvicted = bus.ErrEvicted
)

// RefusedError says that a prompt, control or policy was refused. What intake refused is in the dead letters. A
// control of something that does not exist, or a policy that no sampler could use, is refused before it is stored.
type RefusedError struct {
	// Code is the class of the reason, one of the schemas.Code constants.
	Code   string
	Reason string
	// What was refused: prompt, control or policy.
	What string
}

func (e *RefusedError) Error() string { return e.What + " refused (" + e.Code + "): " + e.Reason }

// HeldError says that a prompt is neither accepted nor refused yet: it is stored, and intake continues once it has
// what it waits for.
type HeldError struct{ Reason string }

func (e *HeldError) Error() string { return "prompt held: " + e.Reason }
