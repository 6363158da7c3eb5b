package models

import (
	"context"
	"fmt"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/hub"
)

// Fetch downloads what the cache lacks of a model and an adapter that names of the Hugging Face Hub stand for; a path
// and an empty name need nothing. The error is that of hub.Fetch.
func Fetch(ctx context.Context, name, adapter string, want hub.Want, watch hub.Watcher) error {
	for _, of := range []struct {
		setting, name string
		want          hub.Want
	}{{"model", name, want}, {"adapter", adapter, hub.Adapter}} {
		_, err := hub.Fetch(ctx, of.name, of.want, watch)
		if err != nil {
			return fmt.Errorf("%s: %w", of.setting, err)
		}
	}
	return nil
}

// Logged tells of downloads in the log.
func Logged(log zerolog.Logger) hub.Watcher {
	const every = 5 * time.Second
	var plan hub.Plan
	var done int64
	var last time.Time
	return hub.Watcher{
		Plan: func(p hub.Plan) {
			plan, done, last = p, p.Have, time.Now()
			log.Info().Str("name", p.Name).Int("files", p.Files).Int64("mib", p.Bytes>>20).Int64("done_mib",
				p.Have>>20).Str("to", p.To).Msg("downloads from the Hugging Face Hub")
		},
		Got: func(n int64) {
			done += n
			if now := time.Now(); now.Sub(last) >= every {
				last = now
				log.Info().Str("name", plan.Name).Int64("done_mib", done>>20).Int64("total_mib",
					plan.Bytes>>20).Msg("downloading")
			}
		},
		Say: func(line string) { log.Warn().Msg(line) },
	}
}

// Wanted is what a sampler needs of a model: a server that draws has the weights.
func Wanted(engine string) hub.Want {
	if engine != "" && !IsTorch(engine) {
		return hub.Description
	}
	return hub.Model
}
