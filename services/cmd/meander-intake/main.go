// Command meander-intake turns prompts into one request per sample. See --help.
package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/internal/boot"
)

func main() {
	defaults := intake.DefaultConfig()
	defaults.Metrics = prometheus.DefaultRegisterer // what the health endpoint shows
	boot.Main(boot.Service[intake.Config]{
		Name:       "intake",
		Summary:    intake.Summary,
		Default:    defaults,
		HealthAddr: "127.0.0.1:8081",
		Setup:      true, // the one program every pipeline has once
		Examples: []string{
			"meander-intake --nats-url nats://127.0.0.1:4222",
			"meander-intake --reward jpeg_incompressibility --log-level debug",
			"MEANDER_NATS_TOKEN=... meander-intake --config intake.yaml",
			"meander-intake --print-config > intake.yaml",
		},
		Health: func(c *intake.Config, h *boot.Health) { c.Health = h.Check },
		Run:    intake.Run,
	})
}
