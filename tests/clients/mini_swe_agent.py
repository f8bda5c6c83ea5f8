"""mini-swe-agent with its own configuration."""
import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

import tools

base_url, key, model, task = tools.arguments()

llm = LitellmModel(
    model_name=f"openai/{model}",
    model_kwargs={"api_base": base_url, "api_key": key},
    cost_tracking="ignore_errors",
)
settings = yaml.safe_load((package_dir / "config" / "mini.yaml").read_text())["agent"]
DefaultAgent(llm, LocalEnvironment(), **{name: settings[name] for name in ("system_template", "instance_template")}).run(task)
