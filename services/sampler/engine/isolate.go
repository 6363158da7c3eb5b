package engine

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
)

// Invalid returns a terminal error for a request that is not valid.
func Invalid(format string, args ...any) error {
	return bus.Terminal(schemas.CodeInvalid, fmt.Errorf(format, args...))
}

// Failed returns a terminal error for a sample that cannot be made.
func Failed(format string, args ...any) error {
	return bus.Terminal(schemas.CodeFailed, fmt.Errorf(format, args...))
}

// Guarded calls f; a panic of its code is a terminal error.
func Guarded(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = bus.Terminal(schemas.CodePanic, fmt.Errorf("panic: %v\n%s", p, debug.Stack()))
		}
	}()
	return f()
}

// evaluation computes rows in one call; faults are errors of single rows by index, err is one of the whole call.
type evaluation[R any] func(rows []R) (faults map[int]error, err error)

// Isolate computes rows in one call and returns the faults of single rows by their index. If the call fails or panics,
// all rows are computed again one by one; if some rows have a fault, those are: so no row fails because of another. An
// error of the whole (a lost device, a full cache, the end of ctx) is returned as it is.
func Isolate[R any](ctx context.Context, rows []R, evaluate evaluation[R]) (faults map[int]error, err error) {
	call := func(rows []R) (faults map[int]error, err error) {
		err = Guarded(func() (err error) {
			faults, err = evaluate(rows)
			return err
		})
		return faults, err
	}
	notOfRows := func(err error) bool {
		return errors.Is(err, tensor.ErrDeviceLost) || errors.Is(err, lm.ErrFull) || err != nil && ctx.Err() != nil
	}
	faults, err = call(rows)
	switch {
	case err == nil && len(faults) == 0:
		return nil, nil
	case notOfRows(err):
		return nil, err
	case len(rows) == 1 && err != nil:
		return map[int]error{0: err}, nil
	case len(rows) == 1:
		return faults, nil
	}
	zerolog.Ctx(ctx).Warn().Err(err).Int("rows", len(rows)).Int("faults", len(faults)).
		Msg("a call of the model failed, its samples are computed one by one")
	alone := map[int]error{}
	for i := range rows {
		if err == nil && faults[i] == nil {
			continue
		}
		fault, failed := call(rows[i : i+1])
		if notOfRows(failed) {
			return nil, failed
		}
		if failed == nil {
			failed = fault[0]
		}
		if failed != nil {
			alone[i] = failed
		}
	}
	return alone, nil
}
