// Command meander-reward scores the images of trajectories. See --help.
package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/reward"
)

func main() {
	defaults := reward.DefaultConfig()
	defaults.Metrics = prometheus.DefaultRegisterer // what the health endpoint shows
	boot.Main(boot.Service[reward.Config]{
		Name:       "reward",
		Summary:    reward.Summary,
		Default:    defaults,
		HealthAddr: "127.0.0.1:8083",
		Examples: []string{
			"meander-reward",
			"meander-reward --require ocr --scorers scorers.yaml",
			"meander-reward --nats-url nats://nats.example:4222 --nats-creds reward.creds",
			"meander-reward --print-config > reward.yaml",
		},
		Run: reward.Run,
	})
}
