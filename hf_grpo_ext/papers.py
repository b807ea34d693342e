"""The papers of the methods, for the model card: the ones that the README's tables and the presets name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper, as it is cited.

    Args:
        method: what the paper calls its method.
        key: of the BibTeX entry.
        authors: as BibTeX writes them.
        title: of the paper.
        year: of its first version.
        arxiv: its arXiv id; `None` for one that is older than arXiv.
        journal: where it appeared, without an arXiv id.

    Example:
        >>> print(ESTIMATOR_PAPERS["gdpo"].bibtex)
        @misc{liu2026gdpo,
          title = {{GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization}},
          author = {Liu, Shih-Yang and others},
          year = {2026},
          eprint = {2601.05242},
          archivePrefix = {arXiv},
        }
    """

    method: str
    key: str
    authors: str
    title: str
    year: int
    arxiv: str | None = None
    journal: str | None = None

    @property
    def bibtex(self) -> str:
        """The BibTeX entry."""
        where = {"eprint": self.arxiv, "archivePrefix": "arXiv"} if self.arxiv else {"journal": self.journal}
        # Two braces keep the capitals of the title.
        fields = {"title": f"{{{self.title}}}", "author": self.authors, "year": self.year, **where}
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
        return "\n".join([f"@{'misc' if self.arxiv else 'article'}{{{self.key},", *lines, "}"])

    @property
    def link(self) -> str:
        """The method in Markdown, with a link to the paper where arXiv has it."""
        return f"[{self.method}](https://arxiv.org/abs/{self.arxiv})" if self.arxiv else self.method


GRPO = Paper(
    "GRPO",
    "shao2024deepseekmath",
    "Shao, Zhihong and others",
    "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    2024,
    "2402.03300",
)
REINFORCE_PLUS_PLUS = Paper(
    "REINFORCE++",
    "hu2025reinforceplusplus",
    "Hu, Jian and Liu, Jason Klein and Xu, Haotian and Shen, Wei",
    "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
    2025,
    "2501.03262",
)

# Each estimator of `ADVANTAGE_ESTIMATORS`, and each loss of `PRESETS`.
ESTIMATOR_PAPERS = {
    "grpo": GRPO,
    "gdpo": Paper(
        "GDPO",
        "liu2026gdpo",
        "Liu, Shih-Yang and others",
        "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization",
        2026,
        "2601.05242",
    ),
    "reinforce_plus_plus": REINFORCE_PLUS_PLUS,
}
LOSS_PAPERS = {
    "ppo": Paper(
        "PPO",
        "schulman2017ppo",
        "Schulman, John and Wolski, Filip and Dhariwal, Prafulla and Radford, Alec and Klimov, Oleg",
        "Proximal Policy Optimization Algorithms",
        2017,
        "1707.06347",
    ),
    "grpo": GRPO,
    "reinforce": Paper(
        "REINFORCE",
        "williams1992reinforce",
        "Williams, Ronald J.",
        "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning",
        1992,
        journal="Machine Learning 8, 229-256",
    ),
    "rloo": Paper(
        "RLOO",
        "ahmadian2024rloo",
        "Ahmadian, Arash and others",
        "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
        2024,
        "2402.14740",
    ),
    "dapo": Paper(
        "DAPO",
        "yu2025dapo",
        "Yu, Qiying and others",
        "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
        2025,
        "2503.14476",
    ),
    "dr_grpo": Paper(
        "Dr. GRPO",
        "liu2025drgrpo",
        "Liu, Zichen and others",
        "Understanding R1-Zero-Like Training: A Critical Perspective",
        2025,
        "2503.20783",
    ),
    "gspo": Paper(
        "GSPO",
        "zheng2025gspo",
        "Zheng, Chujie and others",
        "Group Sequence Policy Optimization",
        2025,
        "2507.18071",
    ),
    "cispo": Paper(
        "CISPO",
        "minimax2025m1",
        "MiniMax",
        "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
        2025,
        "2506.13585",
    ),
    "dual_clip": Paper(
        "dual-clip PPO",
        "ye2019dualclip",
        "Ye, Deheng and others",
        "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning",
        2019,
        "1912.09729",
    ),
    "reinforce_plus_plus": REINFORCE_PLUS_PLUS,
}
