package command

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// jsonOf is an event for JSON: the wire's keys, with binary data replaced by its
// length and digest, and seeds as strings, since most readers of JSON round numbers
// above 2^53.
func jsonOf(e schemas.Event) any {
	data, err := schemas.Encode(e)
	if err != nil {
		return map[string]any{"error": err.Error()}
	}
	return jsonOfBytes(data)
}

// jsonOfBytes is the same for an encoded event that was checked before.
func jsonOfBytes(data []byte) any {
	var v any
	if err := msgpack.Unmarshal(data, &v); err != nil {
		return map[string]any{"error": err.Error()}
	}
	return plain(v)
}

func plain(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			if v[k] = plain(x); k == "sample_seed" || k == "noise_seed" {
				v[k] = fmt.Sprint(x)
			}
		}
	case []any:
		for i, x := range v {
			v[i] = plain(x)
		}
	case []byte:
		sum := sha256.Sum256(v)
		return map[string]any{"bytes": len(v), "sha256": hex.EncodeToString(sum[:])}
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return fmt.Sprint(v)
		}
	case float32:
		return plain(float64(v))
	}
	return v
}

// latestRun is the run of the newest trajectory, else of the newest prompt.
func latestRun(ctx context.Context, b *bus.Bus) (schemas.Run, error) {
	for _, stream := range []string{schemas.StreamTrajectories, schemas.StreamPrompts} {
		m, err := b.Newest(ctx, stream)
		if err == nil {
			return runOfSubject(m.Subject), nil
		}
	}
	return "", usage(fmt.Errorf("nothing is stored yet; make a rollout first: meander run 'a red sign that says \"OPEN\"'"))
}

// runOfSubject is the run token of an event's subject.
func runOfSubject(subject string) schemas.Run {
	run, _ := schemas.RunOf(subject)
	return run
}
