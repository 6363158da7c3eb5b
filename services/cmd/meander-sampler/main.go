// Command meander-sampler denoises requests into steps and trajectories. See --help.
package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/sampler"
)

func main() {
	defaults := sampler.DefaultConfig()
	defaults.Metrics = prometheus.DefaultRegisterer // what the health endpoint shows
	boot.Main(boot.Service[sampler.Config]{
		Name:       "sampler",
		Summary:    sampler.Summary,
		Default:    defaults,
		HealthAddr: "127.0.0.1:8082",
		Examples: []string{
			"meander-sampler --model synthetic --batch 16",
			"meander-sampler --model deploy/models/signs --workers 2",
			"meander-sampler --health-addr 127.0.0.1:8182   # a second one on this machine",
			"meander-sampler --print-config > sampler.yaml",
		},
		Health: func(c *sampler.Config, h *boot.Health) {
			c.Announced, c.Health, c.Note = h.Until("model", "loading"), h.Check, h.Note
		},
		Run: sampler.Run,
	})
}
