package client

import (
	"errors"

	"github.com/meander-rl/meander/pkg/bus"
)

// Why Connect failed.
var (
	// ErrUnreachable: no server answered in time.
	ErrUnreachable = errors.New("no server answers")
	// ErrUnauthorized: the server does not take our token, credentials or certificate, or
	// wants one.
	ErrUnauthorized = errors.New("not let in")
	// ErrUntrusted: the certificate of the server is not signed by an authority that we
	// trust, or there is none where WithCA or WithCertificate asks for TLS.
	ErrUntrusted = errors.New("server not trusted")
	// ErrNoPipeline: the server has no streams of a pipeline; intake makes them.
	ErrNoPipeline = errors.New("no pipeline was set up there")
)

// Why anything else failed.
var (
	// ErrNoAnswer means that no intake answered in time. What was published is stored and
	// will be taken up when one runs.
	ErrNoAnswer = errors.New("no intake answered in time; what was published is stored")
	// ErrJudged means that the sample has a verdict of that name, another one: the first counts.
	ErrJudged = errors.New("the sample has a verdict already")
	// ErrNoImage means that a sample has none, since it could not be made or stops with noise in it.
	ErrNoImage = errors.New("no image")
	// ErrNotFound means that no event or object of that name is stored, or not any more.
	ErrNotFound = bus.ErrNotFound
	// ErrCorrupt means that what is stored is not what the digest in the trajectory names.
	ErrCorrupt = bus.ErrCorrupt
	// ErrFull means that the server has no room. It passes when consumers, age or a purge
	// make room.
	ErrFull = bus.ErrStreamFull
	// ErrTooLarge means that an event is larger than the server takes.
	ErrTooLarge = bus.ErrTooLarge
	// ErrPermission means that our user of the server may not publish that.
	ErrPermission = bus.ErrPermission
	// ErrClosed means that the client has been closed.
	ErrClosed = bus.ErrClosed
	// ErrCursor means that a cursor is none, or of a store that is not there any more.
	ErrCursor = bus.ErrCursor
	// ErrEvicted means that groups behind a cursor may be gone without having been read.
	ErrEvicted = bus.ErrEvicted
)

// RefusedError is intake's refusal of a prompt or a control, which is in the dead letters, or that of a control of what
// is not there or of a policy that no sampler could use, of which nothing is stored.
type RefusedError struct {
	// Code is the class of the reason, one of the schemas.Code constants.
	Code   string
	Reason string
	// What was refused: prompt, control or policy.
	What string
}

func (e *RefusedError) Error() string { return e.What + " refused (" + e.Code + "): " + e.Reason }

// HeldError says that a prompt is neither accepted nor refused yet: it is stored, and goes
// on once there is what it waits for.
type HeldError struct{ Reason string }

func (e *HeldError) Error() string { return "prompt held: " + e.Reason }
