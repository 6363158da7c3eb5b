package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/schemas"
)

// MeanSize estimates how many bytes a message of a run takes in a stream, as the server counts them. It measures the
// newest message; of steps, up to sixteen of its sample once that has ended, since those with latents are far larger
// than the others. 0: the stream has no message of the run, or none that we may read.
func (b *Bus) MeanSize(ctx context.Context, stream string, run schemas.Run) (uint64, error) {
	for _, filter := range schemas.RunFilters(run)[stream] {
		m, err := b.Last(ctx, stream, filter)
		switch {
		case errors.Is(err, ErrNotFound), errors.Is(err, ErrPermission):
		case err != nil:
			return 0, fmt.Errorf("size of a message: %w", err)
		case stream == schemas.StreamSteps:
			return b.meanOfSample(ctx, m)
		default:
			return m.StoredSize(), nil
		}
	}
	return 0, nil
}

// mostMeasured is how many steps of a sample are read for their size.
const mostMeasured = 16

// meanOfSample returns the mean size of the stored steps of the sample that m is a step of, or the size of m while its
// trajectory is not there to name them. It gets them by their sequences: a reader would search the whole stream.
func (b *Bus) meanOfSample(ctx context.Context, m *Message) (uint64, error) {
	a, _ := schemas.ParseSubject(m.Subject)
	var t schemas.Trajectory
	ended, err := b.Last(ctx, schemas.StreamTrajectories, schemas.Address{
		Kind: schemas.KindTrajectory, Run: a.Run, UID: a.UID, Sample: a.Sample, Stage: a.Stage,
	}.Filter())
	if errors.Is(err, ErrNotFound) || errors.Is(err, ErrPermission) || err == nil && Fits(ended, &t) != nil {
		return m.StoredSize(), nil
	}
	if err != nil {
		return 0, fmt.Errorf("size of a step: %w", err)
	}
	sum, n, reads := uint64(0), uint64(0), min(len(t.Steps), mostMeasured)
	for i := range reads {
		step, err := b.Get(ctx, m.Stream, t.Steps[i*len(t.Steps)/reads].Seq)
		if err == nil {
			sum, n = sum+step.StoredSize(), n+1
		} else if !errors.Is(err, ErrNotFound) { // it was freed
			return 0, fmt.Errorf("size of a step: %w", err)
		}
	}
	if n == 0 {
		return m.StoredSize(), nil
	}
	return sum / n, nil
}

// StoredSize returns what the server's file store takes for the message: a record of 22 bytes, a checksum of 8, the
// subject, the payload, and headers in the form of the wire with their length. It may have been read without payload.
func (m *Message) StoredSize() uint64 {
	n := 30 + len(m.Subject) + len(m.Data)
	if len(m.Header) > 0 {
		n += 4 + len("NATS/1.0\r\n\r\n")
	}
	for name, values := range m.Header {
		if name == nats.MsgSize { // the server's own, where it left the payload out
			size, _ := strconv.Atoi(values[0])
			n += size
			continue
		}
		for _, v := range values {
			n += len(name) + len(": \r\n") + len(v)
		}
	}
	return uint64(n)
}
